"""Records of arrays, each an .npz file written whole or not at all: text.npz and patches.npz."""

import io
import math
import zlib
from dataclasses import dataclass, fields
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import Any, ClassVar, Self
from zipfile import BadZipFile, ZipFile

import numpy as np
from jaxtyping import Float, Integer, Shaped, UInt8, jaxtyped

from l2r.errors import InputError
from l2r.files.atomic import write_bytes
from l2r.files.reading import refuse_endless

_MAX_BYTES = 1 << 30  # unpacked: a page holds them all in memory, some of them twice
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# RuntimeError: of an archive that is encrypted, or packed in a way that Python lacks.
_UNREADABLE = (
    OSError, ValueError, EOFError, BadZipFile, MemoryError, RuntimeError, zlib.error, LZMAError,
)  # fmt: skip


def parse_npy(content: bytes) -> np.ndarray:
    """Parse the array of a ``.npy`` file; no pickle is read.

    Raises ValueError for anything else, and for a header that promises more or less than there is.
    """
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise InputError(f"version must be 1.0 or 2.0; got {version}")
        shape, by_columns, kind = _HEADERS[version](stream)
    except (SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise InputError(f"its header cannot be read: {error}") from error
    there, due = len(content) - stream.tell(), math.prod(shape) * kind.itemsize
    if kind.hasobject or there != due:
        raise InputError(f"it must hold {due:,} bytes of {kind} {list(shape)}; got {there:,}")
    order: Any = "F" if by_columns else "C"
    return np.ndarray(shape, kind, content, stream.tell(), order=order).copy(order)


class Arrays:
    """Base of a dataclass of arrays, each in the file under its name; ``what`` it is, in words."""

    what: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        stream = io.BytesIO()
        np.savez_compressed(stream, **{f.name: getattr(self, f.name) for f in fields(self)})
        write_bytes(path, stream.getvalue())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file. Raises ValueError when it is missing or another."""
        names = {field.name for field in fields(cls)}
        refuse_endless(path)
        try:
            with path.open("rb") as file, ZipFile(file) as archive:
                parts = {part.filename.removesuffix(".npy"): part for part in archive.infolist()}
                if sum(part.file_size for part in archive.infolist()) > _MAX_BYTES:
                    raise InputError(f"its arrays must take at most {_MAX_BYTES:,} bytes")
                arrays = {n: parse_npy(archive.read(parts[n])) for n in sorted(names & set(parts))}
        except _UNREADABLE as error:
            reason = str(error) or type(error).__name__
            raise InputError(f"cannot read {cls.what} from {path}: {reason}") from error
        if names - set(arrays):
            missing = ", ".join(sorted(names - set(arrays)))
            raise InputError(f"{path} holds no {cls.what}: {missing} missing")
        with jaxtyped("context"):  # one size per letter, over all arrays
            for field in fields(cls):
                array = arrays[field.name]
                if not isinstance(array, field.type):  # type: ignore[arg-type]
                    raise InputError(
                        f"{path} holds no {cls.what}: {field.name} is {array.dtype} "
                        f"{list(array.shape)}, which does not fit the other arrays"
                    )
        return cls(**{name: arrays[name] for name in names})


@dataclass(frozen=True)
class TextRouting(Arrays):
    """Routing of B x S tokens in L layers of N experts; P x C of them are kept one by one.

    pieces: text of every distinct token. tokens: all of the text as positions in pieces; domain:
    of each row, a position in domains. shown: the rows of which the first C tokens are kept,
    those of one domain after another.

    Of each such token: experts, the heaviest first, -1 behind the k of a layer that chooses fewer
    than others; weights, what their outputs are multiplied by;
    margin, the gap between the two largest logits; entropy of softmax(logits) over log N; radius,
    within which no change of the router's input changes the first expert, NaN without a proof
    (remarks has a line per layer that says why, or is empty).

    Of each expert, over all of the text: contexts, the tokens (b S + s) that it weighs most, and
    their weights; vocabulary, the pieces of which the largest shares come to it, and how many of
    each did. -1 where there are fewer. Shares are ranked by the low end of Wilson's 95% interval.
    """

    what: ClassVar = "text routing"

    layers: Shaped[np.ndarray, " L"]
    remarks: Shaped[np.ndarray, " L"]
    domains: Shaped[np.ndarray, " G"]
    pieces: Shaped[np.ndarray, " V"]
    tokens: Integer[np.ndarray, "B S"]
    domain: Integer[np.ndarray, " B"]
    shown: Integer[np.ndarray, " P"]
    experts: Integer[np.ndarray, "L P C K"]
    weights: Float[np.ndarray, "L P C K"]
    margin: Float[np.ndarray, "L P C"]
    entropy: Float[np.ndarray, "L P C"]
    radius: Float[np.ndarray, "L P C"]
    contexts: Integer[np.ndarray, "L N M"]
    context_weights: Float[np.ndarray, "L N M"]
    vocabulary: Integer[np.ndarray, "L N W"]
    vocabulary_counts: Integer[np.ndarray, "L N W"]


@dataclass(frozen=True)
class PatchRouting(Arrays):
    """Routing of the patches of B images in L layers; patches form a grid of P x Q.

    layers: their names. experts: those chosen, the heaviest first. weights: what their outputs are
    multiplied by. class_token: experts of the class token. predictions: the class that the model
    guesses, besides labels; both are positions in classes. num_experts: N.
    """

    what: ClassVar = "patch routing"

    layers: Shaped[np.ndarray, " L"]
    experts: Integer[np.ndarray, "L B P Q K"]
    weights: Float[np.ndarray, "L B P Q K"]
    class_token: Integer[np.ndarray, "L B K"]
    predictions: Integer[np.ndarray, " B"]
    num_experts: Integer[np.ndarray, ""]
    images: UInt8[np.ndarray, "B height width C"]
    labels: Integer[np.ndarray, " B"]
    classes: Shaped[np.ndarray, " G"]
