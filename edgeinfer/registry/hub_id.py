"""What names a checkpoint on the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_ID_LENGTH = 96
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository and a branch, tag or commit of it."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


def parse_id(text: str) -> HubId | None:
    """`ORG/NAME` or `ORG/NAME@REVISION`; None for anything else."""
    match = _ID.fullmatch(text)
    if match is None or len(text) > MAX_ID_LENGTH or ".." in text or "--" in text:  # the Hub allows none of these
        return None
    return HubId(match[1], match[2] or "main")
