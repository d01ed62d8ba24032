"""Where results are written: checked before the work starts, under their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.temporary import temporary_folder


@contextmanager
def written_to(output: Path) -> Iterator[None]:
    """Turn an OSError into a ResourceError that names the output."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{output}: cannot be written ({error.strerror})", "free some space, or choose another -o"
        ) from error


def check_outputs(outputs: Sequence[Path], nbytes: int, inputs: Collection[Path], *, overwrite: bool) -> None:
    """Raise UsageError when one of the outputs may not be written, ResourceError when all `nbytes` of them cannot be.

    They lie in one directory. `inputs` are never replaced, nor is a device or a pipe.
    """
    with written_to(outputs[0]):
        for output in outputs:
            _check_name(output, inputs, overwrite=overwrite)
        folder = outputs[0].parent
        if not folder.exists():
            raise ResourceError(f"{folder}: no such directory to write to", "make it, or choose another -o")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ResourceError(f"{folder}: not a directory that can be written to", "choose another -o")
        free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ResourceError(
            f"{outputs[0]}: needs {nbytes} bytes, the disk has {free} free",
            "free some space, or choose a smaller type",
        )


def _check_name(output: Path, inputs: Collection[Path], *, overwrite: bool) -> None:
    if output.is_dir():
        raise UsageError(f"{output}: is a directory", "name a file with -o")
    if os.path.lexists(output) and not overwrite:
        raise _exists(output)
    if not output.exists():
        return
    if not output.is_file():
        raise UsageError(f"{output}: not a regular file", "name a file with -o")
    if any(output.samefile(path) for path in inputs if path.exists()):
        raise UsageError(f"{output}: is an input of this very command", "choose another -o")


@contextmanager
def replaced_when_done(*outputs: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary path of the first of `outputs`; the files there take their names if the block ends well.

    If not, they go away. The others are to be made beside the first, each by its own name. The first output gets its
    name last, so that whoever sees it sees all; an interruption among the renames takes the new names back, too.

    Raises UsageError when another process has made an output meanwhile and it may not be overwritten.
    """
    begun: list[tuple[Path, Path]] = []
    # Not beside the output under a name made of its own, which may be as long as a name can be already.
    with temporary_folder(outputs[0].parent) as folder:
        partials = tuple(folder / output.name for output in outputs)
        try:
            yield partials[0]
            for output in outputs:
                if os.path.lexists(output) and not overwrite:  # another process was faster
                    raise _exists(output)
            for partial, output in reversed(list(zip(partials, outputs, strict=True))):
                begun.append((partial, output))
                os.replace(partial, output)
            begun.clear()
            _sync_directory(folder.parent)
        finally:
            for partial, output in begun:
                if not partial.exists():  # else the name is still that of what was there before
                    output.unlink(missing_ok=True)


def _exists(output: Path) -> UsageError:
    return UsageError(f"{output}: exists already", "give --overwrite to replace it")


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
