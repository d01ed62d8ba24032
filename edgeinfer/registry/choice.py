"""Which of a repository's GGUF files is meant by `ORG/NAME:QUANT`. Names come from the network: most are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgeinfer.errors import NotFoundError, listed

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
"""Without a QUANT the first of these that there is, then the first file: llama.cpp's order (common/download.cpp)."""
_SAFE_NAME = re.compile(r"(?:\w[\w.+@-]*/)*\w[\w.+-]*\.gguf", re.ASCII)
MAX_NAME_LENGTH = 250
# What stands beside models under the same suffix: projectors, matrices, heads for speculation.
_NO_MODEL = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-", re.IGNORECASE)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:(?:I?Q|TQ)\d\w*|B?F16|F32|MXFP4\w*|NVFP4))(?=[-.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in a repository: one file, or all shards of one in their order."""

    files: tuple[str, ...]

    @property
    def quant(self) -> str:
        """Its type as its name has it, or nothing."""
        found = _QUANT.findall(_stem(self.files[0]))
        return found[-1].upper() if found else ""

    def is_called(self, quant: str) -> bool:
        """Whether the name has this type in it, as a part of its own."""
        pattern = rf"(?:^|[-._/]){re.escape(quant)}(?=[-./]|$)"
        return re.search(pattern, _stem(self.files[0]), re.IGNORECASE) is not None


def candidates(names: Iterable[str]) -> list[Candidate]:
    """The models among a repository's files, in the order of their names; sets of shards that lack some are none."""
    safe = sorted(n for n in names if is_safe(n) and not _NO_MODEL.search(n.rpartition("/")[2]))
    found, present = [], set(safe)
    for name in safe:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            found.append(Candidate((name,)))
        elif int(shard[2]) == 1:
            count = int(shard[3])
            # Counted first: a name can claim 99999 of them.
            if 1 <= count <= len(present):
                files = tuple(f"{shard[1]}-{i:05}-of-{shard[3]}.gguf" for i in range(1, count + 1))
                if present.issuperset(files):
                    found.append(Candidate(files))
    return found


def is_safe(name: str) -> bool:
    """Whether a name can become a path below a directory, on every system."""
    return len(name) <= MAX_NAME_LENGTH and ".." not in name and _SAFE_NAME.fullmatch(name) is not None


def choose(subject: str, found: list[Candidate], quant: str) -> Candidate:
    """The model that a QUANT, or its absence, means. Raises NotFoundError that says which there are."""
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        for candidate in found:
            if candidate.is_called(wanted):
                return candidate
    if found and not quant:
        return found[0]
    if not found:
        raise NotFoundError(
            f"{subject}: no GGUF file in this repository", "`edgeinfer convert` makes one of a checkpoint"
        )
    there = listed(list(dict.fromkeys(c.quant or c.files[0] for c in found)))
    raise NotFoundError(f"{subject}: no file of type {quant} in this repository", f"there are {there}")


def _stem(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return shard[1] if shard else name.removesuffix(".gguf")
