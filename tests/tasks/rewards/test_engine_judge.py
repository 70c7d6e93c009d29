"""A judge on an engine of the run: the same questions have the same answers, and its death gives no score."""

import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from storage.backends.root import open_root
from storage.errors import InputError, WorkerLost
from storage.exchanges import RunExchanges
from storage.manifest import find, need
from storage.parts import read_table
from storage.schema import REWARD
from storage.upkeep.verify import verify
from tasks.checks import check_config
from tasks.config.environment import Settings
from tasks.config.model import GeneratedModel, ModelSection
from tasks.config.stored import check_record, forked_config
from tasks.data.models import fill_model_directory
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import COMPLETIONS, Collected, EngineProtocol, Finished
from tasks.rewards.engine_judge import EngineJudge, Questions
from tasks.rewards.judge import Judges, Remembered, judged
from tasks.rewards.scoring import notices
from tasks.stages.names import Stage
from tasks.stages.scored import judges_of
from tasks.stages.trial import try_reward
from tasks.stages.views import Prepared
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.interface import EngineHandle
from tasks.workers.placement import bundles, card_of_judge
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, driver
from tests.small.here import GroupHere, WorkersHere, context_here

TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
RUBRIC = {"rubric": "{question} {response}", "score": r"(\d)"}
LONGEST = 24


class AnsweringEngine(EngineProtocol):
    """Answers the last digit of the sum of a question's tokens and its seed, one question after another; `lost` after
    so many answers."""

    def __init__(self, codec, says=lambda prompt, seed: str((sum(prompt) + seed) % 10), lost=None):
        self.codec, self.says, self.lost, self.queued, self.asked = codec, says, lost, [], []

    def drop(self):
        self.queued.clear()
        return {}

    def enqueue(self, number, prompts, seeds, sampling, begun=(), every=None, name=""):
        self.queued.append((number, [*prompts[0]], seeds[0], sampling))

    def collect(self, wait_s):
        if not self.queued:
            return Collected([], 0)
        if self.lost is not None and len(self.asked) >= self.lost:
            raise WorkerLost("engine judge was killed")
        number, prompt, seed, sampling = self.queued.pop(0)
        self.asked.append((tuple(prompt), seed, sampling.temperature))
        tokens = [*self.codec.encode(self.says(prompt, seed)), sampling.stop_token_ids[0]]
        row = [[tokens], [[-0.5] * len(tokens)], ["stop"]]
        columns = [pa.array(column, kind) for column, kind in zip(row, COMPLETIONS.types, strict=True)]
        return Collected([Finished(number, pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS))], 1)


def made(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Folder of a judge whose tokens are characters."""
    folder.mkdir()
    generated = GeneratedModel(layers=1, hidden=16, intermediate=16, heads=2, max_positions=LONGEST)
    fill_model_directory(folder, ModelSection(generate=generated), 7)
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("models") / "judge")


@pytest.fixture(scope="module")
def codec(model):
    return TextCodec.from_directory(model, left_out=None)


def asked(count):
    return [({"question": "1+1"}, f"{number}") for number in range(count)]


def judges(codec, engine, kept=None, questions=None):
    own = EngineJudge("digest", LONGEST, questions or Questions(), lambda: codec, lambda: engine)
    return Judges(Remembered() if kept is None else kept, own)


def test_a_question_has_its_own_answer_whatever_is_asked_beside_it(codec):
    engines = [AnsweringEngine(codec) for _ in range(2)]
    together = judged({**RUBRIC, "at_once": 40}, asked(40) * 2, judges(codec, engines[0]))
    alone = [judged(RUBRIC, [one], judges(codec, engines[1]))[0] for one in reversed(asked(40))]
    assert [one.reward for one in together] == [one.reward for one in reversed(alone)] * 2
    assert sorted(engines[0].asked) == sorted(engines[1].asked)  # equal ones once, with the same tokens and seeds
    assert len({seed for _, seed, _ in engines[0].asked}) == 40
    prompts = {"".join(codec.visible(prompt)) for prompt, _, _ in engines[0].asked}
    assert prompts == {f"1+1 {number}=" for number in range(40)}  # by the judge's own template


def test_the_engine_that_judges_dies(codec):
    """No response has a score from that, and what was answered is not asked again."""
    kept, first, second = Remembered(), AnsweringEngine(codec, lost=5), AnsweringEngine(codec)
    questions = Questions()
    with pytest.raises(WorkerLost, match="was killed"):
        judged(RUBRIC, asked(30), judges(codec, first, kept, questions))
    assert {exchange.attempts for exchange in kept.values()} == {1}
    assert len(kept) == len(first.asked) == 5
    scores = judged(RUBRIC, asked(30), judges(codec, second, kept, questions))
    assert len(second.asked) == 25
    whole = judged(RUBRIC, asked(30), judges(codec, AnsweringEngine(codec)))
    assert [one.reward for one in scores] == [one.reward for one in whole]
    assert None not in [one.reward for one in whole]


def test_scorings_of_two_threads_share_the_engine(codec):
    engine, questions, found = AnsweringEngine(codec), Questions(), {}

    def score(place):
        mine = [({"question": f"{place}"}, f"{number}") for number in range(20)]
        found[place] = [one.reward for one in judged(RUBRIC, mine, judges(codec, engine, None, questions))]

    threads = [threading.Thread(target=score, args=[place]) for place in range(3)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    both, engine = dict(found), AnsweringEngine(codec)
    for place in range(3):
        score(place)
    assert found == both


def test_an_answer_without_a_score_is_asked_for_again_where_it_can_be_another(codec):
    engine = AnsweringEngine(codec, lambda prompt, seed: "-")
    (score,) = judged(RUBRIC, asked(1), judges(codec, engine))
    assert (score.reward, score.reason, len(engine.asked)) == (None, "no_number", 1)
    (score,) = judged({**RUBRIC, "temperature": 0.5, "retries": 2}, asked(1), judges(codec, engine))
    assert (score.reward, score.reason, len(engine.asked)) == (None, "no_number", 4)
    assert len({seed for _, seed, _ in engine.asked}) == 4


def test_a_question_that_is_too_long_names_the_setting(codec):
    engine = AnsweringEngine(codec)
    (score,) = judged(RUBRIC, [({"question": "1" * LONGEST}, "2")], judges(codec, engine))
    assert (score.reward, score.reason, engine.asked) == (None, "exception", [])
    assert f"{LONGEST + 3} tokens, and engines.judge.max_model_len is {LONGEST}" in score.detail


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "m"}, "model has no effect without url"),
        ({"api_key": "k", "per_minute": 2}, "api_key, per_minute has no effect without url"),
        ({"url": "http://127.0.0.1:9"}, "set model"),
    ],
)
def test_arguments_of_the_other_kind_are_refused(codec, change, told):
    with pytest.raises(InputError, match=told):
        judged({**RUBRIC, **change}, asked(1), judges(codec, AnsweringEngine(codec)))


def test_without_url_and_engine_nobody_is_asked():
    with pytest.raises(InputError, match=r"no reward.arguments.url, .* engines.judge.source"):
        judged(RUBRIC, asked(1), Judges())


class JudgingWorkers(WorkersHere):
    """Small workers, and an engine that judges."""

    def __init__(self, config, lost=None):
        super().__init__(config)
        self.lost, self.engine, self.starts = lost, None, 0

    def judge(self, model_dir):
        if self.engine is None or not self.handle.alive():
            self.engine = AnsweringEngine(TextCodec.from_directory(Path(model_dir)), lost=self.lost)
            self.handle = EngineHandle(GroupHere([self.engine], self.calls.append), self._config.workers)
            self.starts += 1
        return self.handle


SETTINGS = (
    'reward.function="judge"', 'reward.arguments={rubric="{prompt} {response}", score="([0-9])"}', "run.iterations=1",
    f"engines.judge.max_model_len={LONGEST}",
)  # fmt: skip


def config_of(model, *more):
    return small_config([f'engines.judge.source="{model}"', *SETTINGS, *more])


def rewards(root):
    return read_table(root, need(root, RUN, 1, Stage.REWARD), REWARD, ["reward"])["reward"].to_pylist()


def test_a_run_keeps_its_judge_and_goes_on_after_its_death(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    [(copy / path.name).write_bytes(path.read_bytes()) for path in model.iterdir()]
    config, whole, root = config_of(copy), *(open_root(str(tmp_path / name)) for name in ("whole", "root"))
    undisturbed = driver(whole, config, tmp_path / "a", workers=JudgingWorkers(config))
    undisturbed.drive()
    with pytest.raises(WorkerLost, match="was killed"):
        driver(root, config, tmp_path / "b", workers=JudgingWorkers(config, lost=8)).drive()
    assert find(root, RUN, 1, Stage.REWARD) is None
    [path.unlink() for path in copy.iterdir()]  # the run has its own
    later = driver(root, config, tmp_path / "c", workers=JudgingWorkers(config))
    later.drive()
    assert rewards(root) == rewards(whole)
    assert len(set(rewards(whole))) > 1
    assert 8 + len(later.workers.engine.asked) == len(undisturbed.workers.engine.asked)
    assert len(undisturbed.workers.engine.asked) <= PROMPTS * SAMPLES + 2 * config.evaluate.prompts
    exchanges = list((tmp_path / "root" / RUN / "exchanges").iterdir())
    kept = RunExchanges(root, RUN).find(exchanges[0].stem)
    assert kept is not None
    assert kept.url.startswith("engines.judge:")
    assert "judge/model.safetensors" in need(root, RUN, 0, Stage.PREPARE).part_names
    assert verify(root, RUN).sound


def test_a_rerun_asks_nothing_and_starts_no_engine(model, tmp_path):
    config, root = config_of(model), open_root(str(tmp_path / "root"))
    driver(root, config, tmp_path / "a", workers=JudgingWorkers(config)).drive()
    workers = JudgingWorkers(config)
    with context_here(root, config, tmp_path / "b", RUN, workers=workers) as context:
        prepared = need(root, RUN, 0, Stage.PREPARE)
        judging = judges_of(context, Prepared(prepared))
        trial = try_reward(root, RUN, 1, config.reward, judging)
        assert (trial.changed, trial.unscored, workers.starts) == (0, 0, 0)
        other = {**config.reward.arguments, "rubric": "{response} {prompt}"}
        again = try_reward(root, RUN, 1, config.reward.model_copy(update={"arguments": other}), judging)
        assert (again.unscored, workers.starts) == (0, 1)
        weights = prepared.part("judge/model.safetensors")
        other = [one.model_copy(update={"digest": "0" * 32}) if one == weights else one for one in prepared.parts]
        changed = judges_of(context, Prepared(prepared.model_copy(update={"parts": tuple(other)})))
        assert changed.engine.name != judging.engine.name
    with pytest.raises(InputError, match="what iteration 0"):
        forked_config(root, RUN, "fork", ["engines.judge.precision=bf16"])
    with pytest.raises(InputError, match=f"max_model_len: the run was started with {LONGEST}, but is now given 64"):
        check_record(root, RUN, config_of(model, "engines.judge.max_model_len=64"))  # longer questions have no score


URL = 'reward.arguments={url="http://127.0.0.1:9", model="m", rubric="{response}"}'


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["engines.judge.max_model_len=4096"], f"has a context of {LONGEST} tokens, but engines.judge.max_model_len"),
        (['engines.judge.source="nowhere"'], "engines.judge.source nowhere does not exist"),
        ([URL], "has no effect, because no reward asks that engine"),
        (['reward.function="exact_match"', "reward.arguments={}"], "has no effect, because no reward asks"),
        (
            ['reward={function="exact_match"}', "environment.function=maze"],
            r"because the environment gives the rewards: leave \[engines.judge\] out",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_the_run(model, tmp_path, settings, told):
    with pytest.raises(InputError, match=told):
        check_config(config_of(model, *settings), open_root(str(tmp_path)))


def test_a_model_without_a_template_and_a_judge_without_anybody_are_refused(model, tmp_path):
    root, plain = open_root(str(tmp_path / "root")), made(tmp_path / "plain", None)
    with pytest.raises(InputError, match=r"engines.judge.source .*plain has no chat template"):
        check_config(config_of(plain), root)
    with pytest.raises(InputError, match=r'"judge" has no url in its arguments, and the run has no'):
        check_config(small_config(SETTINGS[:3]), root)
    check_config(config := config_of(model), root)
    assert "its judge is an engine" in notices(config.reward)[0]


def test_the_engine_has_its_own_model_room_and_card(model, tmp_path):
    config = config_of(model, "engines.judge.kv_cache_mib=3", "engines.judge.max_num_seqs=5", "engine.max_num_seqs=7")
    cards = Settings(ray_address=None, gpus=("4", "5"))
    spec = Fleet("run", config, Cluster(cards)).judge_spec(tmp_path)
    assert (spec.max_model_len, spec.max_num_seqs, spec.kv_cache_bytes) == (LONGEST, 5, 3 << 20)
    assert not spec.together
    assert (card_of_judge(cards, "cuda"), card_of_judge(cards, "cpu")) == (("5",), ())
    assert bundles(config, "cpu")["judge"] == [{"CPU": 1.0}]
    assert "judge" not in bundles(small_config(), "cpu")
