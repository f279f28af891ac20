"""Damaged and hostile feature files: refused with their name, nothing of them run, and no more memory than a row's."""

import gzip
import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import offline_features
import pipeline
from eaglefeed.errors import InputError
from eaglefeed.interop.arrow_rows import ArrowRows
from eaglefeed.interop.specforge import SpecForgeFolder
from eaglefeed.interop.speculators import SpeculatorsFolder

H, N = 4, 6
MAX_BYTES = 10_000
ROW = offline_features.Row([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 1, 1])
CONTRACT = pipeline.contract(hidden_size=H, max_length=N)


def _ckpt() -> dict[str, torch.Tensor]:
    states = torch.ones(N, 3, H)
    return offline_features.specforge_row(ROW, offline_features.Taken(states, states[:, 0], states[:, 0]))


class _Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> object:
        return os.system, (self._command,)


def _deflated(values: object) -> bytes:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(values, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as copy:
        for entry in source.infolist():
            copy.writestr(entry.filename, source.read(entry))
    return packed.getvalue()


def _read_ckpt(folder: Path, data: bytes, name: str = "a.ckpt") -> None:
    (folder / name).write_bytes(data)
    (file,) = SpecForgeFolder(folder).files()
    SpecForgeFolder(folder).read(file.name, MAX_BYTES)


def _saved(values: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def test_a_whole_file_is_read_compressed_or_not(tmp_path: Path) -> None:
    _read_ckpt(tmp_path, _saved(_ckpt()))
    (tmp_path / "a.ckpt").unlink()
    _read_ckpt(tmp_path, gzip.compress(_saved(_ckpt())), "a.ckpt.gz")


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hostile = [_saved(_ckpt() | {"input_ids": _Runs(ran)}), pickle.dumps(_Runs(ran)), _saved(_Runs(ran))]
    for data in hostile:
        with pytest.raises(InputError, match=r"^a\.ckpt: cannot be loaded, wanted a torch\.save of tensors"):
            _read_ckpt(tmp_path, data)
    assert not ran.exists()


def test_a_file_that_decompresses_to_more_than_a_row_is_refused_before_it_does(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^a\.ckpt\.gz: too large, wanted at most 10000 bytes.*got more"):
        _read_ckpt(tmp_path, gzip.compress(bytes(10**7)), "a.ckpt.gz")
    (tmp_path / "a.ckpt.gz").unlink()
    values = _ckpt() | {"aux_hidden_state": torch.zeros(1, 10**5, 3 * H)}
    packed = _deflated(values)
    assert len(packed) < MAX_BYTES
    with pytest.raises(InputError, match=r"^a\.ckpt: too large"):
        _read_ckpt(tmp_path, packed)


def test_a_view_that_is_larger_than_its_memory_is_not_copied_out(tmp_path: Path) -> None:
    _, states = (tmp_path / "a.ckpt"), torch.zeros(1).expand(1, 10**12, 3 * H)
    (tmp_path / "a.ckpt").write_bytes(_saved(_ckpt() | {"aux_hidden_state": states}))
    row = SpecForgeFolder(tmp_path).read("a.ckpt", MAX_BYTES)
    assert row.aux.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be loaded"),
        (_saved(_ckpt())[:-200], "cannot be loaded"),
        (_saved([1, 2]), "not a dictionary.*got list"),
        (_saved({name: tensor for name, tensor in _ckpt().items() if name != "loss_mask"}), "other tensors"),
        (_saved(_ckpt() | {"target": torch.ones(1)}), "other tensors"),
        (_saved(_ckpt() | {"loss_mask": [0, 1]}), "no such tensor in it, wanted loss_mask, got list"),
        (_saved(_ckpt() | {"loss_mask": torch.ones(6).to_sparse()}), "no such tensor in it, wanted loss_mask"),
    ],
    ids=["empty", "cut", "list", "missing", "more", "no tensor", "sparse"],
)
def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=rf"^a\.ckpt: .*{message}"):
        _read_ckpt(tmp_path, data)


@pytest.mark.parametrize("data", [gzip.compress(_saved(_ckpt()))[:-9], b"no gzip at all"], ids=["cut", "plain"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"^a\.ckpt\.gz: cannot be read"):
        _read_ckpt(tmp_path, data, "a.ckpt.gz")


def test_files_that_would_be_one_sample_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/b.ckpt", "a.b.ckpt.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"^a\.b: two files would be one sample, got a/b\.ckpt and a\.b\.ckpt\.gz"):
        SpecForgeFolder(tmp_path).files()


def test_a_name_that_makes_no_sample_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a b.ckpt").write_bytes(b"")
    with pytest.raises(InputError, match=r"^a b\.ckpt: its name makes no sample id"):
        SpecForgeFolder(tmp_path).files()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    with pytest.raises(InputError, match="no regular file"):
        SpecForgeFolder(tmp_path).read("a.ckpt", MAX_BYTES)


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    offline_features.write_dataset(tmp_path, [ROW, ROW])
    for index in range(2):
        offline_features.write_states(tmp_path, index, torch.ones(N, 4, H), torch.tensor(ROW.ids))
    return tmp_path


def test_a_link_to_nothing_is_refused(speculators: Path) -> None:
    (speculators / "a.ckpt").symlink_to(speculators / "nothing")
    (speculators / "hidden_states" / "hs_2.safetensors").symlink_to(speculators / "nothing")
    with pytest.raises(InputError, match=r"^a\.ckpt: cannot be read, got No such file"):
        SpecForgeFolder(speculators).files()
    with pytest.raises(InputError, match=r"^hs_2\.safetensors: cannot be read, got No such file"):
        SpeculatorsFolder(speculators, CONTRACT).files()


def _replace(folder: Path, **changes: torch.Tensor) -> None:
    values = {"hidden_states": torch.ones(N, 4, H), "token_ids": torch.tensor(ROW.ids)} | changes
    (folder / "hidden_states" / "hs_1.safetensors").write_bytes(save(values))


def _read_hs(folder: Path) -> None:
    files = SpeculatorsFolder(folder, CONTRACT)
    files.read(files.files()[1].name, MAX_BYTES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.tensor([1, 2, 3, 4, 5, 7])}, "other tokens than its row's"),
        ({"token_ids": torch.tensor([1, 2, 3])}, r"other tokens.*wanted 6 from .*got 3 from \[1, 2, 3\]"),
        ({"token_ids": torch.ones(6)}, "other tokens"),
        ({"hidden_states": torch.ones(N, 3, H)}, r"wanted \['n', 4, 4\], got \[6, 3, 4\]; .*\[2, 3, 4\]"),
        ({"hidden_states": torch.ones(N, 4, H + 1)}, r"wanted \['n', 4, 4\], got \[6, 4, 5\]"),
        ({"hidden_states": torch.ones(N, 4 * H)}, r"got \[6, 16\]"),
        (
            {
                "hidden_states": torch.ones(N, 4, H).to(torch.float8_e4m3fn),
                "hidden_states_scales": torch.ones(N, 4, 1),
            },
            r"scales of another shape, wanted \[6, 1, 1\], got \[6, 4, 1\]",
        ),
    ],
    ids=["token", "short", "float tokens", "layers", "H", "rank", "scales"],
)
def test_states_that_do_not_fit_their_row_are_refused(
    speculators: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    _replace(speculators, **changes)
    with pytest.raises(InputError, match=rf"^hs_1\.safetensors: .*{message}"):
        _read_hs(speculators)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_cut_file_is_refused(speculators: Path, cut: int) -> None:
    path = speculators / "hidden_states" / "hs_1.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"^hs_1\.safetensors: no whole safetensors file"):
        _read_hs(speculators)


@pytest.mark.parametrize("name", ["hs_2.safetensors", "hs_01.safetensors", "hs_x.safetensors"])
def test_a_file_without_a_row_is_refused(speculators: Path, name: str) -> None:
    (speculators / "hidden_states" / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"^{name}: no row"):
        SpeculatorsFolder(speculators, CONTRACT, is_partial=True).files()


@pytest.mark.parametrize(
    "state",
    [
        "",
        "{}",
        "[]",
        pytest.param("[" * 10**5, id="deep"),
        '{"_data_files": []}',
        '{"_data_files": [{"filename": "../x.arrow"}]}',
        '{"_data_files": 3}',
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused(speculators: Path, state: str) -> None:
    (speculators / "state.json").write_text(state)
    with pytest.raises(InputError, match=f"^{speculators}: "):
        ArrowRows(speculators)


def test_damaged_and_other_columns_are_refused(speculators: Path, tmp_path: Path) -> None:
    data = speculators / "data-00000-of-00001.arrow"
    whole = data.read_bytes()
    for cut in (0, 100, len(whole) // 2):
        data.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="its data set cannot be read"):
            ArrowRows(speculators)
