"""Packs: a damaged one costs a compilation, never an answer."""

import hashlib
import os
import zipfile

import pytest

from edgeless.kernels import Image, Pack, write_pack
from edgeless.kernels import pack as pack_module
from edgeless.kernels import store as store_module
from edgeless.kernels.store import unpacked

KEY, OTHER = "a" * 64, "b" * 64
IMAGE = Image("cubin", "_Z6kernelv", bytes(range(256)) * 4)


def test_a_pack_has_what_was_put_into_it(tmp_path):
    file = tmp_path / "pack"
    images = {KEY: IMAGE, OTHER: Image("ptx", "other", b"// text\n\0")}
    write_pack(file, images)
    pack = Pack(file)
    assert {key: pack.get(key) for key in images} == images
    assert len(pack) == 2 and pack.get("c" * 64) is None
    again = tmp_path / "again"
    write_pack(again, dict(reversed(images.items())))
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("data", [b"", b"PK", b"no archive", bytes(1000)])
def test_a_file_that_is_no_pack_is_an_error(tmp_path, data):
    (tmp_path / "pack").write_bytes(data)
    with pytest.raises(ValueError, match="file must be a pack of kernels, but .*pack is not"):
        Pack(tmp_path / "pack")


def test_a_damaged_member_is_compiled_anew(tmp_path):
    file = tmp_path / "pack"
    write_pack(file, {KEY: IMAGE})
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        begin = archive.infolist()[0].header_offset + 30 + len(KEY)
    data[begin + 20] ^= 255
    file.write_bytes(data)
    assert Pack(file).get(KEY) is None


def test_no_byte_of_a_pack_that_is_altered_raises_anything_else(tmp_path):
    file = tmp_path / "pack"
    write_pack(file, {KEY: IMAGE})
    data = file.read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 255
        file.write_bytes(changed)
        try:
            found = Pack(file).get(KEY)
        except ValueError as error:
            assert "must be a pack of kernels" in str(error)
        else:
            assert found in (None, IMAGE)


def test_a_foreign_image_with_a_checksum_is_none():
    for body in (b"[1]\ncode", b'{"kind": 1}\ncode', b"no JSON\ncode", b""):
        assert unpacked(store_module.MAGIC + hashlib.sha256(body).digest() + body) is None


def test_a_foreign_member_is_no_image(tmp_path):
    file = tmp_path / "pack"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(KEY, b"\x7fELF")
    assert Pack(file).get(KEY) is None


def test_the_environment_names_packs(tmp_path, monkeypatch):
    default = pack_module.default_packs.__wrapped__
    write_pack(tmp_path / "one", {KEY: IMAGE})
    write_pack(tmp_path / "two", {OTHER: IMAGE})
    monkeypatch.setenv("EDGELESS_KERNEL_PACKS", os.pathsep.join([str(tmp_path / "one"), "", str(tmp_path / "two")]))
    assert [pack.file.name for pack in default()][:2] == ["one", "two"]
    monkeypatch.setenv("EDGELESS_KERNEL_PACKS", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        default()
    monkeypatch.delenv("EDGELESS_KERNEL_PACKS")
    monkeypatch.setattr(pack_module, "__file__", str(tmp_path / "pack.py"))
    assert default() == ()
    write_pack(tmp_path / "kernels.pack", {KEY: IMAGE})
    assert [pack.get(KEY) for pack in default()] == [IMAGE]


def test_a_pack_that_is_gone_or_cut_off_has_no_images(tmp_path):
    file = tmp_path / "pack"
    write_pack(file, {KEY: IMAGE, OTHER: IMAGE})
    pack, data = Pack(file), file.read_bytes()
    for size in (0, 10, 100, len(data) // 4):
        file.write_bytes(data[:size])
        assert pack.get(KEY) is None
    file.unlink()
    assert pack.get(KEY) is None and len(pack) == 2
