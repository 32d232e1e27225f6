"""Where compiled kernels are kept, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shoal_kernels.jit import writable_folder


def test_the_first_folder_that_can_be_written_is_taken(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert writable_folder([blocked, tmp_path / "user"], "kernels-1") == tmp_path / "user" / "kernels-1"
    with pytest.raises(OSError, match="no folder for compiled kernels"):
        writable_folder([blocked], "kernels-1")


def test_a_folder_behind_a_link_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernels-1").symlink_to(tmp_path / "elsewhere")
    assert writable_folder([tmp_path / "a", tmp_path / "b"], "kernels-1") == tmp_path / "b" / "kernels-1"


def test_only_the_last_few_versions_are_kept(tmp_path: Path) -> None:
    for age, name in enumerate("abcdef"):
        folder = tmp_path / f"kernels-{name}"
        folder.mkdir()
        os.utime(folder, (1000 - age, 1000 - age))
    writable_folder([tmp_path], "kernels-new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels-a", "kernels-b", "kernels-c", "kernels-new"]


def test_without_numba_the_references_serve_and_say_so_once() -> None:
    program = (
        "import sys, logging; sys.modules['numba'] = None\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s %(op)s')\n"
        "import shoal_kernels\n"
        "shoal_kernels.warm(); shoal_kernels.self_test(); shoal_kernels.self_test()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.count("kernel_backend_missing linear") == 1
    assert result.stderr.count("kernel_backend_chosen linear") == 1
