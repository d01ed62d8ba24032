"""Compiles ik_llama.cpp for this very processor, outside the repository: the package's library knows AVX2 alone.

The source is that of the package, which cannot be built by pip (a file of `common` is not in it). Prints the library's
path, for $IK_LLAMA_CPP_LIB_PATH, where the package looks first. Needs cmake and a C++ compiler, and ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from build_peers import call, download
from toolbox import cache_dir, run

from edgeinfer.cli import console
from edgeinfer.errors import ResourceError
from edgeinfer.native import ik_package

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # most of the time, for caches that edgeinfer does not use there
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DCMAKE_C_FLAGS=-w",  # its warnings are a hundred times as long as the rest
    "-DCMAKE_CXX_FLAGS=-w",
)


def source() -> Path:
    """The fork's source, out of the package's; fetched unless it is there."""
    folder = cache_dir("kernels") / ik_package.VERSION
    if not folder.is_dir():
        download(ik_package.REQUIREMENT, folder)
    return folder / "vendor" / "ik_llama.cpp"


def build() -> Path:
    """The library, built now unless it is there already."""
    folder = cache_dir("kernels") / f"{ik_package.VERSION}-build"
    library = folder / "lib" / "libllama.so"
    if not library.is_file():
        if shutil.which("cmake") is None:
            raise ResourceError("cmake is not installed", "install cmake and a C++ compiler, then try again")
        console.note(f"compiling ik_llama.cpp {ik_package.VERSION}: about ten minutes on two cores")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        place = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={library.parent}"
        call(["cmake", "-S", str(source()), "-B", str(folder), *generator, *CMAKE_OPTIONS, place])
        call(["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", "ggml", "llama"])
    return library


def main() -> None:
    """Build, and print where."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console.result(str(build()))


if __name__ == "__main__":
    run(main)
