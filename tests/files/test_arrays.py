"""Arrays of files that may be a stranger's."""

import io
import struct
import zipfile

import numpy as np
import pytest

from l2r.files.arrays import PatchRouting, parse_npy


def npy(header, data=b"", version=(1, 0)):
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(header)) + header + data


def saved(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.zeros((0, 5)),
        np.array("ä"),
    ],
)
def test_an_array_is_read_as_numpy_reads_it(array):
    read = parse_npy(saved(array))
    expected = np.load(io.BytesIO(saved(array)))
    assert read.dtype == expected.dtype and read.flags.writeable
    assert read.flags.f_contiguous == expected.flags.f_contiguous
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        npy(b"(" * 9000),
        npy(b"{" * 500),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"a" * 8),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000, 1000000)}", b"a" * 8),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -1)}", b"a" * 8),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}", b"a" * 8, (9, 9)),
        saved(np.arange(6))[:-1],
        saved(np.arange(6)) + b"a",
    ],
)
def test_anything_else_is_refused(content):
    with pytest.raises(ValueError, match=r"\w"):
        parse_npy(content)


def archive(path, name, content, **changes):
    """A zip file with one part, whose entry in the list of parts is changed."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, content)
        for field, value in changes.items():
            setattr(file.infolist()[0], field, value)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_type": 99},
        {"flag_bits": 1},
        {"compress_type": zipfile.ZIP_LZMA},
        {"file_size": 2**40},
    ],
    ids=["unknown packing", "encrypted", "no lzma", "says 2^40 bytes"],
)
def test_archives_that_cannot_be_unpacked_are_refused(tmp_path, changes):
    path = archive(tmp_path / "a.npz", "images.npy", saved(np.zeros(3)), **changes)
    with pytest.raises(ValueError, match="cannot read patch routing"):
        PatchRouting.read(path)


def test_an_archive_that_unpacks_to_gigabytes_is_refused_unread(tmp_path):
    path = tmp_path / "a.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("images.npy", "w", force_zip64=True) as part,
    ):
        for _ in range(1100):
            part.write(bytes(1 << 20))
    with pytest.raises(ValueError, match="at most 1,073,741,824 bytes"):
        PatchRouting.read(path)
