"""The pages and their style for people with a keyboard, a screen reader, little contrast or a small screen."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from flows.viewer.pages import application
from storage.backends.root import Root
from tasks.config.code_version import PROJECT_ROOT
from tests.flows.viewer.test_viewer import HERE, paths, sample_of
from tests.small.driving import RUN

CSS = (PROJECT_ROOT / "flows" / "viewer" / "static" / "viewer.css").read_text()
TEXT, MARK = 4.5, 3.0
"""Least contrast of text and of other marks (WCAG 2.2, 1.4.3 and 1.4.11)."""
VOID = {"meta", "link", "input", "img", "br", "path", "polyline", "circle", "rect"}


class Page(HTMLParser):
    """A page as far as the rules below look at it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.flaws: list[str] = []
        self.headings: list[int] = []
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.labels: set[str] = set()
        self._fields: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.flaws += [f"field {one} has no label" for one in self._fields if one not in self.labels]
        self.flaws += [f"id {name} occurs {count} times" for name, count in self.ids.items() if count > 1]
        steps = zip([0, *self.headings], self.headings, strict=False)
        self.flaws += [f"h{after} after h{before}" for before, after in steps if after > before + 1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids.update([given["id"]] if given.get("id") else [])
        self.flaws += [f"{tag} has {name}" for name in given if name == "style" or name.startswith("on")]
        self.flaws += [
            f"{tag} loads {url}" for name in ("src", "href") if (url := given.get(name) or "").startswith("http")
        ]
        if tag == "script" and not given.get("src"):
            self.flaws.append("a script in the page")
        if tag == "img" and not given.get("alt"):
            self.flaws.append("an image without a text")
        if tag == "th" and given.get("scope") not in ("col", "row"):
            self.flaws.append("a header of a table without its direction")
        if tag == "svg" and given.get("aria-hidden") != "true":
            self.flaws.append("a drawing that is read out")
        if tag in ("input", "select") and given.get("type") != "hidden":
            named = "label" in self._open or bool(given.get("aria-label"))
            self._fields += [] if named else [given.get("id") or tag]
        if tag == "label":
            self.labels.add(given.get("for") or "")
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "a" and "svg" in self._open and given.get("tabindex") != "-1":
            self.flaws.append("a link in a drawing is reached by Tab")
        self._open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]


def test_every_page_can_be_read_out_and_used_by_keyboard(root: Root):
    browser = TestClient(application(root), HERE)
    for path in (one for one in [*paths(root), "/run/nobody"] if not one.endswith("/curve")):
        text = browser.get(path).text
        page = Page(text)
        assert not page.flaws, (path, page.flaws)
        assert (page.tags["main"], page.tags["h1"], page.tags["nav"] >= 1) == (1, 1, True), path
        assert '<html lang="en">' in text
        assert re.search(r"<title>\s*\S.* - Ratchet</title>", text)
        assert text.index('class="skip" href="#main"') < text.index("<nav")


def test_the_rules_find_flaws():
    flawed = '<h1>a</h1><h3>b</h3><input><img src="http://x"><p id="c" style="d"><p id="c"><script>e</script><th>'
    assert len(Page(flawed).flaws) == 8


def colors(theme: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme))


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_marks_have_contrast(dark: bool):
    light_part, _, dark_part = CSS.partition("@media (prefers-color-scheme: dark)")
    theme = {**colors(light_part), **(colors(dark_part) if dark else {})}
    assert not dark or set(colors(dark_part)) == set(colors(light_part))
    grounds = [name for name in theme if re.fullmatch(r"page|raised|surprise-\d|version-\d|better|worse", name)]
    assert len(grounds) == 15
    wanted = [("text", ground, TEXT) for ground in grounds]
    wanted += [(name, ground, TEXT) for name in ("quiet", "link", "trouble") for ground in ("page", "raised")]
    wanted += [(name, "page", MARK) for name in theme if name.startswith("run-") or name == "edge"]
    weak = {(ink, ground): contrast(theme[ink], theme[ground]) for ink, ground, least in wanted
            if contrast(theme[ink], theme[ground]) < least}  # fmt: skip
    assert not weak


@pytest.fixture(scope="module")
def address(root: Root):
    """The address that a real `ratchet view` has printed; Ctrl-C ends it."""
    words = [sys.executable, "-m", "flows", "view", "--root", root.url, "--json"]
    with subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        yield json.loads(viewer.stdout.readline())["url"]
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(60) == 0


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as browsers:
        launched = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.slow
def test_axe_finds_nothing_in_any_page(root: Root, address: str, browser):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    rules = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
    of_color = {**rules, "runOnly": {"type": "rule", "values": ["color-contrast"]}}

    def found(
        options: dict,
    ) -> tuple[list[str], set[str]]:  # the script comes through the DevTools protocol: pages let none in
        answer = axe.Axe().run(page, options=options).response
        said = [f"{page.url}: {one['id']}: {node['html']}" for one in answer["violations"] for node in one["nodes"]]
        return said, {one["id"] for one in answer["incomplete"]}

    for scheme, options in (("light", rules), ("dark", of_color)):
        page = browser.new_context(color_scheme=scheme).new_page()
        page.goto(address)
        for path in (one for one in [*paths(root), "/run/nobody"] if not one.endswith("/curve")):
            page.goto(address.partition("?")[0].rstrip("/") + path)
            flaws, undecided = found(options)
            assert not flaws
            assert undecided <= {"color-contrast"}  # of numbers in drawings: the test of contrast has their colors
        flawed = "'<input><p id=faint>can hardly be read</p>'"
        page.evaluate(f"document.querySelector('main').insertAdjacentHTML('beforeend', {flawed})")
        page.evaluate("document.getElementById('faint').style.opacity = 0.3")
        wanted = ["color-contrast", *(["label"] if scheme == "light" else [])]
        assert sorted(one.split(": ")[1] for one in found(options)[0]) == wanted


@pytest.mark.slow
def test_a_browser_shows_it_with_and_without_scripts(root: Root, address: str, browser):
    prompt, sample = sample_of(root)
    place = address.partition("?")[0].rstrip("/")
    plain = browser.new_context(java_script_enabled=False, viewport={"width": 320, "height": 640}).new_page()
    plain.goto(address)
    for path in paths(root):
        plain.goto(place + path)
        assert plain.evaluate("document.documentElement.scrollWidth") <= 320, path
    plain.goto(f"{place}/run/{RUN}")
    plain.get_by_role("link", name="1", exact=True).first.click()  # from the table of iterations to a token
    plain.locator(".cards a").first.click()
    assert plain.get_by_role("heading", name="Response by token").is_visible()
    assert plain.locator(".token[title]").count() > 0

    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    assert page.url == f"{place}/"
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the content"
    page.goto(f"{place}/run/{RUN}/1/sample?prompt={quote(prompt)}&sample={sample}")
    page.locator("[data-tokens]").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#token-now").inner_text().startswith("token 1: ")
    page.keyboard.press("Home")
    assert page.locator("#token-now").inner_text().startswith("token 0: ")
    page.goto(f"{place}/run/{RUN}/search?where=reward+%3E%3D+0")
    page.get_by_role("button", name="Copy").click()
    assert not said
