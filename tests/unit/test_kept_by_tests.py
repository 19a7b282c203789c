"""The folder of content-addressed results of tests: outside the files that a run deletes, and outside the
user's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearfar.folders import cache_folder, data_folder
from tests.support.kept import UNUSED, use_kept


def test_all_of_it_lies_in_the_folder_that_the_environment_names(tmp_path: Path) -> None:
    environment = {"NEARFAR_TEST_CACHE": str(tmp_path), "MESA_SHADER_CACHE_MAX_SIZE": "3G"}
    use_kept(environment)
    (zig,) = (tmp_path / "zig").iterdir()
    assert environment == {
        "NEARFAR_TEST_CACHE": str(tmp_path),
        "NEARFAR_KERNEL_CACHE": str(tmp_path / "kernels"),
        "MESA_SHADER_CACHE_DIR": str(tmp_path / "mesa"),
        "MESA_SHADER_CACHE_MAX_SIZE": "3G",
        "ZIG_GLOBAL_CACHE_DIR": str(zig),
    }
    assert (tmp_path / "mesa").is_dir()


def test_without_a_name_it_is_beside_the_user_s_cache_and_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    environment: dict[str, str] = {}
    use_kept(environment)
    kernels = Path(environment["NEARFAR_KERNEL_CACHE"])
    assert kernels == tmp_path / "home" / "nearfar-tests" / "kernels"
    assert not kernels.is_relative_to(cache_folder())


def test_a_run_has_a_home_of_its_own() -> None:
    for folder in (cache_folder(), data_folder()):
        assert folder.parent.name.startswith("nearfar-tests-home-")
        assert not folder.is_relative_to(Path.home())


def test_what_zig_of_another_version_made_is_given_up_after_a_month(tmp_path: Path) -> None:
    environment = {"NEARFAR_TEST_CACHE": str(tmp_path)}
    for name in ("0.1", "0.2"):
        (tmp_path / "zig" / name / "o").mkdir(parents=True)
    os.utime(tmp_path / "zig" / "0.1", (1000, 1000))
    use_kept(environment)
    used = Path(environment["ZIG_GLOBAL_CACHE_DIR"])
    assert {each.name for each in (tmp_path / "zig").iterdir()} == {"0.2", used.name}
    os.utime(used, (1000, 1000))
    use_kept(environment, now=1000 + UNUSED)  # this version's folder is used now
    assert used.is_dir()
