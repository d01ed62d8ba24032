"""What can go wrong with the Hub, as errors of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from edgeinfer.errors import EdgeinferError, NotFoundError, ResourceError, UsageError
from edgeinfer.registry.hub_id import HubId

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def check_endpoint() -> None:
    """Before the library is imported, which prints what it dislikes to stdout."""
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        parts = urlsplit(endpoint or "https://huggingface.co")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(f"HF_ENDPOINT is {endpoint!r}, not the address of a Hub", "unset it")


@contextmanager
def translated(hub_id: HubId) -> Iterator[None]:
    """The library's many exceptions as ours."""
    import logging

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its advice is not for the users of this program
    try:
        yield
    except EdgeinferError:
        raise
    except Exception as error:
        raise _translate(hub_id, error) from error


def _translate(hub_id: HubId, error: BaseException) -> Exception:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    reach = _reach(hub_id)
    gated = NotFoundError(f"{hub_id}: the repository is gated", "ask for access on its page, then set HF_TOKEN")
    rules: tuple[tuple[Callable[[], bool], Exception], ...] = (
        (lambda: isinstance(error, errors.GatedRepoError), gated),
        (
            lambda: isinstance(error, errors.RevisionNotFoundError),
            NotFoundError(f"{hub_id}: no revision {hub_id.revision!r} in this repository", "see its page for branches"),
        ),
        (
            lambda: status in (401, 403) and _has_token(),
            NotFoundError(f"{hub_id}: the Hub does not accept the token", "check HF_TOKEN, or `hf auth login` again"),
        ),
        (
            lambda: isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404),
            NotFoundError(
                f"{hub_id}: neither a path here nor a repository on the Hub that may be read",
                "check the spelling; a private repository needs HF_TOKEN",
            ),
        ),
        (
            lambda: isinstance(error, UnicodeEncodeError),
            NotFoundError(f"{hub_id}: the token has characters that no token has", "check HF_TOKEN"),
        ),
        (
            lambda: isinstance(error, errors.OfflineModeIsEnabled),
            NotFoundError(f"{reach} must not be asked", "unset HF_HUB_OFFLINE"),
        ),
        (lambda: status is not None, NotFoundError(f"{reach} answers with HTTP {status}", "try again later")),
        (
            lambda: type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES,
            NotFoundError(f"{reach} cannot be reached ({_first_line(error)})", "check the network"),
        ),
    )
    for applies, ours in rules:
        if applies():
            return ours
    if error.__cause__ is not None:
        return _translate(hub_id, error.__cause__)
    if isinstance(error, OSError) and error.errno:
        return ResourceError(f"{hub_id}: cannot be stored ({error.strerror})", "free some space, or set HF_HOME")
    if isinstance(error, OSError):  # a transfer that does not have the announced size
        return NotFoundError(
            f"{hub_id}: the download failed ({_first_line(error)})", "try again: it goes on from there"
        )
    if isinstance(error, MemoryError):
        return error
    # The library trusts the Hub, and stumbles over an answer of something else, such as a proxy's page.
    return nonsense(hub_id, f"{type(error).__name__}: {_first_line(error)}")


def nonsense(hub_id: HubId, what: str) -> NotFoundError:
    """The error for an answer that no Hub gives."""
    return NotFoundError(
        f"{_reach(hub_id)} gives an answer that is not a Hub's ({what})", "check HF_ENDPOINT, and the proxy if any"
    )


def _reach(hub_id: HubId) -> str:
    from huggingface_hub import constants

    return f"{hub_id}: not in the local cache, and the Hub ({constants.ENDPOINT})"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
