"""What a file is that should hold weights and does not: most such files are failed downloads of a known kind."""

from __future__ import annotations

_CONVERT = "convert the checkpoint to safetensors, or download its safetensors version"
_RENAME = "name it *.pt or *.bin if it is meant, or download the safetensors version"
_UNPACK = "unpack it, or download the file again without that encoding"
_AGAIN = "download the file again; check the address and the access token"

_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    # (offset, bytes, what it is, remedy); sources: git-lfs docs/spec.md, git-annex "internals", RFC 1952, PKWARE
    # APPNOTE 4.3.7, Python's pickle.PROTO, ggml docs/gguf.md, HDF5 file format 3.0, RFC 8878, xz-file-format 2.1.1
    (
        0,
        b"version https://git-lfs",
        "a Git LFS pointer, not the weights",
        "run `git lfs pull` in the model's directory",
    ),
    (0, b"/annex/objects/", "a git-annex pointer, not the weights", "run `git annex get` in the model's directory"),
    (0, b"\x1f\x8b", "gzip data", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "zstd data", _UNPACK),
    (0, b"\xfd7zXZ\x00", "xz data", _UNPACK),
    (0, b"BZh", "bzip2 data", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"PK\x03\x04", "a zip archive, as torch.save writes it", _RENAME),
    (0, b"\x80\x02", "a pickle, as torch.save writes it", _RENAME),
    (0, b"\x80\x03", "a pickle", _RENAME),
    (0, b"\x80\x04", "a pickle", _RENAME),
    (0, b"\x80\x05", "a pickle", _RENAME),
    (0, b"GGUF", "a GGUF file", _CONVERT),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
)


def recognised(head: bytes) -> tuple[str, str] | None:
    """What the file that begins with `head` (some hundred bytes) is, and the remedy; None when nothing fits.

    Only for files that cannot be read: the length of valid safetensors can look like any of these.
    """
    for offset, magic, what, remedy in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return what, remedy
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page, not the weights", _AGAIN
    if text.startswith(b"<"):
        return "an XML document, as object stores answer errors, not the weights", _AGAIN
    if text.startswith((b"{", b"[")):
        return "JSON text, not the weights", _AGAIN
    if head and not head.strip(b"\0"):
        return "zeros where the header should be: a download that never finished", _AGAIN
    return None
