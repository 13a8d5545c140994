"""Say what a file that is not a little-endian GGUF looks like, from its first bytes."""

from __future__ import annotations

GGUF_MAGIC = b"GGUF"
SNIFF_BYTES = 512

_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive (PyTorch checkpoints are ZIP archives too)"),
    (b"version https://git-lfs", "a Git LFS pointer: the real file was not fetched (run `git lfs pull`)"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"lmgg", "a GGML file from before GGUF; convert the original model again"),
    (b"fmgg", "a GGMF file from before GGUF; convert the original model again"),
    (b"tjgg", "a GGJT file from before GGUF; convert the original model again"),
    (b"\x80\x02", "a Python pickle (an old PyTorch checkpoint)"),
)


def describe_start(start: bytes) -> str:
    """Return words for a file that begins with `start` (up to SNIFF_BYTES bytes) and not with the GGUF magic."""
    for magic, words in _MAGICS:
        if start.startswith(magic):
            return f"it looks like {words}"
    if len(start) > 8 and start[8:9] == b"{":
        length = int.from_bytes(start[:8], "little")
        if length < 1 << 32:
            return "it looks like a safetensors file; convert it to GGUF first"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        return "it looks like a web page (HTML or XML): the download link led to a page, not to the file"
    if text.startswith((b"{", b"[")):
        return "it looks like JSON text: often an error message of the server it was downloaded from"
    if start and not any(start):
        return f"its first {len(start)} bytes are zero: an unfinished or preallocated download"
    return f"it begins with {start[:8].hex(' ')}, a GGUF begins with {GGUF_MAGIC.hex(' ')} ('GGUF')"
