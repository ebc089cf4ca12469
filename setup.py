"""Builds the drafting core in C++ (native/); pyproject.toml has all the rest.

The extension is optional: without a compiler lpr runs the same core in Python, more slowly.

scikit-build-core (0.11, tried) fails the installation where compilation fails. Of its editable modes, one shadows
PYTHONPATH, so that a second checkout imports the first, and the other builds in the root of the checkout.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildInParallel(build_ext):
    """Compiles a file a core at a time (`--parallel` of setuptools builds several extensions at a time, not files)."""

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                parts = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [file for files in parts for file in files]

        self.compiler.compile = compile_all
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Take what an earlier editable build left in lpr/, if nothing is newer. (Setuptools looks elsewhere.)

        An sdist has nothing there, unless a test puts it there; a published wheel is compiled by its own rules.
        """
        made = Path(self.get_ext_fullpath(ext.name))
        kept = Path("lpr", made.name)
        if kept.exists() and made.resolve() != kept.resolve() and not CHOSEN:
            newest = max(Path(each).stat().st_mtime for each in (*ext.sources, *ext.depends, "setup.py"))
            if kept.stat().st_mtime > newest:
                made.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(kept, made)
                return
        super().build_extension(ext)


HERE = Path(nanobind.source_dir()).parent
CHOSEN = os.environ.get("CXXFLAGS", "") or os.environ.get("CIBUILDWHEEL", "")
OPTIMISED = [] if "-O" in os.environ.get("CXXFLAGS", "") else ["-O3"]

setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        Extension(
            "lpr._native",
            [str(path) for path in sorted(Path("native").glob("*.cpp"))],
            include_dirs=[nanobind.include_dir(), nanobind.source_dir(), str(HERE / "ext" / "robin_map" / "include")],
            depends=[str(path) for path in sorted(Path("native").glob("*.h"))],
            # The same sums as Python, to the last bit: no reordering, and no multiplication fused with an addition.
            extra_compile_args=[
                "-std=c++17",
                *OPTIMISED,
                "-g0",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
            ],
            define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
            language="c++",
            optional=True,
        )
    ],
)
