"""Secrets in a configuration: it names them (`env:NAME`) and never holds them; nothing that is shown contains one."""

import base64
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic import JsonValue

from storage.errors import InputError

MASK = "***"  # shown in place of a secret
_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
ELSEWHERE = f"remove them and set them where the AWS SDK looks for them ({_AWS})"  # of credentials in a URL
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")

_SECRET = re.compile(
    r"(?:^| )(?:apikey|auth|authorization|bearer|cookie|credentials?|pass(?:phrase|word|wd)|pwd|secrets?|token"
    r"|(?:access|account|api|auth|client|encryption|private|secret|shared|signing|subscription) key)$"
)
# tokens of a text, not of a service
_TEXT_TOKEN = re.compile(
    r"(?:^| )(?:begin|bos|end|eos|eot|first|last|mask|max|min|num|pad|per|sep|special|start|stop|unk) token$"
)
_SIGNATURE = re.compile(r"(?i)key|sig|(?:x-(?:amz|goog)-)?signature|x-(?:amz|goog)-credential")

# the second form of a password is not valid in a URL, but S3's secrets have slashes; a number before one is a port
_USER_INFO = re.compile(
    r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://"
    r"[^/\s?#@:\[]*(?P<password>:[^/\s?#]*|:(?!\d+/)[^\s?#]{0,400}?)?@"
)
_QUERY = re.compile(r"(?P<name>[?&#;][A-Za-z0-9_.-]+)=(?P<value>[^&#;\s'\"]+)")

# of variables of an environment, which have no form: a word of the name, and a value that is not a setting
_SECRET_WORD = re.compile(
    r"(?:\w*(?:apikey|passphrase|passwd|password|secrets?|token)"
    r"|auth|bearer|cookie|credentials?|dsn|jwt|keys?|pass|pat|pwd|webhook)\d*"
)
_SECRET_END = re.compile(r"(?:^| )auth (?:header|string)$")
_FOLDERS = ("PWD", "OLDPWD")
_KNOWN_FORM = re.compile(
    r"(?:sk|pk|rk)[-_][A-Za-z0-9]|gh[pousr]_|github_pat_|glpat-|hf_[A-Za-z]|xox[a-z]-|A[KS]IA[A-Z0-9]{12}|AIza|ya29\."
    r"|npm_[A-Za-z0-9]{20}|pypi-|SG\.[A-Za-z0-9_-]{10}|eyJ[A-Za-z0-9_-]{4,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_RANDOM = re.compile(r"[0-9a-fA-F]{32,}|(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+/_=.~-]{20,}")
_SHORTEST = 6  # a shorter value would be masked inside of words


def referenced(value: JsonValue) -> str | None:
    """The environment variable that a value names, if it is of the form `env:NAME`."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return found.group(1) if found else None


def is_secret(name: str) -> bool:
    """True if a key is named like one that holds a secret: api_key, HF_TOKEN, clientSecret, db-password."""
    words = " ".join(_WORDS.findall(name)).lower()
    return _SECRET.search(words) is not None and _TEXT_TOKEN.search(words) is None


def literal_secrets(value: JsonValue, path: str, secret: bool = False) -> Iterator[str]:
    """Paths of values at and below `path` that hold a secret: by their key, or as a URL with credentials."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from literal_secrets(inner, f"{path}.{key}", secret or is_secret(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from literal_secrets(inner, f"{path}[{number}]", secret)
    elif (secret and _is_literal(value)) or (isinstance(value, str) and has_credentials(value)):
        yield path


@functools.lru_cache(maxsize=1024)
def secret_texts(name: str, value: str) -> tuple[str, ...]:
    """The texts by which a variable of the environment would give a secret away; none if it does not look like one. It
    does if its name says so and it is not a folder, number or word, if the value has the form of a key or is random,
    or if it has credentials in a URL."""
    inner = [text for found in _USER_INFO.finditer(value) if (text := (found["password"] or "")[1:])]
    inner += [unquote(text) for text in inner]
    inner += [text for text in value.split("/") if "://" in value and _RANDOM.fullmatch(text)]
    found = [value] if _looks_secret(name, value) or inner or has_credentials(value) else []
    if found and not inner:  # user:password, Bearer token
        found += [value.partition(":")[2], value.rpartition(" ")[2]]
    lines = [line for text in found for line in text.splitlines()]
    forms = {form for text in (*found, *inner, *lines) for form in forms_of(text)}
    return tuple(form for form in forms if len(form) >= _SHORTEST)


def forms_of(secret: str) -> tuple[str, ...]:
    """Spellings of a secret in texts: plain, quoted for Python, JSON or a URL, and in base64."""
    quoted = (repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret), quote(secret, safe=""))
    return (secret, *quoted, base64.b64encode(secret.encode(errors="surrogateescape")).decode().rstrip("="))


def _looks_secret(name: str, value: str) -> bool:
    words = [word for word in " ".join(_WORDS.findall(name)).lower().split() if not word.isdecimal()]
    if name in _FOLDERS or len(value) < _SHORTEST or (value.startswith(("/", "~", ".")) and Path(value).exists()):
        return False
    is_path = value.startswith("/") and value.count("/") > 1
    if _KNOWN_FORM.match(value.removeprefix("Bearer ")) or (_RANDOM.fullmatch(value) and not is_path):
        return True
    named = [_SECRET_WORD.fullmatch(word) is not None for word in words]
    if named[-1:] == [True] or is_secret(name) or _SECRET_END.search(" ".join(words)):
        return _TEXT_TOKEN.search(" ".join(words)) is None
    return any(named) and len(value) > 2 * _SHORTEST and any(map(str.isdigit, value))


def has_credentials(text: str) -> bool:
    """True if a text contains a URL with a password or a signature."""
    return shown_text(text) != text


def check_root_url(url: str) -> None:
    """Raises InputError: a storage root has credentials in its URL, which is shown, and recorded by Prefect."""
    if has_credentials(url):
        raise InputError(f"the storage root {shown_text(url)} has credentials in its URL: {ELSEWHERE}")


def shown_text(text: str) -> str:
    """The text with every password and signature in its URLs masked."""
    return _QUERY.sub(_mask_query, _USER_INFO.sub(_mask_user, text)) if "://" in text else text


def shown(value: JsonValue, name: str = "") -> JsonValue:
    """A value as it may be shown, stored or logged; `name` is its key."""
    if isinstance(value, dict):
        return {key: shown(inner, name if is_secret(name) else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner, name) for inner in value]
    if is_secret(name) and _is_literal(value):
        return MASK
    return shown_text(value) if isinstance(value, str) else value


def shown_setting(setting: str) -> str:
    """`section.key=value` as it may be shown."""
    key, _, value = setting.partition("=")
    hidden = is_secret(key.strip()) and referenced(value.strip().strip("'\"")) is None
    return f"{key}={MASK}" if value and hidden else shown_text(setting)


def _is_literal(value: JsonValue) -> bool:
    return value not in (None, "") and not isinstance(value, bool) and referenced(value) is None


def _mask_user(found: re.Match[str]) -> str:
    # a user name alone is not a secret, but in an http URL it may be a token
    secret = found["password"] or found["scheme"].lower() in ("http", "https")
    return f"{found['scheme']}://{MASK}@" if secret else found.group()


def _mask_query(found: re.Match[str]) -> str:
    name = found["name"][1:]
    return f"{found['name']}={MASK}" if _SIGNATURE.fullmatch(name) or is_secret(name) else found.group()
