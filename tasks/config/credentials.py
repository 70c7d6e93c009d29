"""Secrets in a configuration: it names them (`env:NAME`) and never holds them; nothing that is shown contains one."""

import re
from collections.abc import Iterator

from pydantic import JsonValue

from storage.errors import InputError

MASK = "***"
"""Shown in place of a secret."""

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


def referenced(value: JsonValue) -> str | None:
    """The environment variable that a value names, if it is of the form `env:NAME`."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return found.group(1) if found else None


def is_secret(name: str) -> bool:
    """Whether a key is named like one that holds a secret: api_key, HF_TOKEN, clientSecret, db-password."""
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


def has_credentials(text: str) -> bool:
    """Whether a text contains a URL with a password or a signature."""
    return shown_text(text) != text


def check_root_url(url: str) -> None:
    """Refuse a storage root whose URL has credentials: the URL is shown, and recorded by Prefect.

    Raises:
        InputError: it has credentials.
    """
    if has_credentials(url):
        raise InputError(
            f"the storage root {shown_text(url)} has credentials in its URL: remove them and set them where the "
            "AWS SDK looks for them (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
        )


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
