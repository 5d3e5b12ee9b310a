"""Python sources as bytes, and texts from them with planted strings that a model has to copy from far back."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LARGEST_FILE = 256 * 1024  # larger ones are tables that a program wrote
HELD_OUT = 25  # one folder in so many is for evaluation
SEPARATOR = b"\0"  # begins every file
READERS = 16  # files read at once

#: Kinds of bytes: natural text, a planted string, its repetition, and the line breaks around both.
TEXT, PLANTED, REPEATED, BREAK = range(4)
LETTER = (97, 123)  # a ... z
NEWLINE = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, uint8 [num_bytes] each; ``name`` says how much of what, with the digest."""

    train: Tensor
    held_out: Tensor
    name: str
    digest: str


def default_folders() -> list[Path]:
    """The sources of Python's standard library and of every installed package."""
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return [Path(place) for place in dict.fromkeys(places)]


def _folders(roots: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    """Every folder with its .py files in order of name, folders in the order of the digests of their names.

    The digests mix packages, so that the first bytes hold some of all; files of a folder stay together, because a long
    text should be about one thing. Folders of tests are kept: they are Python too.
    """
    found: dict[str, list[Path]] = {}
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in ("__pycache__", "site-packages")]
            files = [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
            if files:
                # with the name of the root: the standard library and the packages both have files at the top
                found.setdefault(os.path.join(root.name, os.path.relpath(folder, root)), []).extend(files)
    return sorted(found.items(), key=lambda item: _digest(item[0].encode()))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _content(path: Path) -> bytes:
    """Of a file; nothing where it is too large or cannot be read."""
    try:
        return path.read_bytes() if path.stat().st_size <= LARGEST_FILE else b""
    except OSError as error:
        print(f"left out: {path}: {error.strerror}", file=sys.stderr)
        return b""


def _contents(folders: Sequence[tuple[str, list[Path]]]) -> Iterator[tuple[str, bytes]]:
    """Folder and content of every file, each content once; reads ahead by some folders."""
    seen: set[bytes] = set()
    with ThreadPoolExecutor(READERS) as pool:
        for first in range(0, len(folders), 8 * READERS):
            some = folders[first : first + 8 * READERS]
            paths = [(name, path) for name, files in some for path in files]
            for (name, _), content in zip(
                paths, pool.map(_content, [path for _, path in paths]), strict=True
            ):
                digest = _digest(content)
                if content and digest not in seen:
                    seen.add(digest)
                    yield name, content


def read_corpus(roots: Sequence[Path], most: int, least_held_out: int) -> Corpus:
    """About ``most`` bytes of .py files below ``roots``, a twenty-fifth of the folders held out.

    Raises:
        ValueError: fewer than ``least_held_out`` bytes are held out, or a tenth of that to train on.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    size = files = 0
    for folder, content in _contents(_folders(roots)):
        held_out = _digest(folder.encode())[-1] % HELD_OUT == 0
        parts[held_out].append(SEPARATOR + content)
        size, files = size + len(content) + 1, files + 1
        if size >= most and sum(map(len, parts[True])) >= least_held_out:
            break
    train, held = (b"".join(parts[part]) for part in (False, True))
    if len(held) < least_held_out or len(train) < least_held_out:
        raise ValueError(
            f"the text below {', '.join(map(str, roots))} has {len(train)} bytes to train on and {len(held)} held "
            f"out; at least {least_held_out} of each are needed"
        )
    digest = hashlib.sha256(train + held).hexdigest()[:12]
    name = f"{files} Python files, {size / 1e6:.1f} MB, sha256 {digest}"
    return Corpus(_tensor(train), _tensor(held), name, digest)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@dataclass(frozen=True)
class Texts:
    """Texts with planted strings.

    Attributes:
        tokens: int64 [B, T + 1]; the model reads the first T and predicts the last T.
        kinds: uint8 [B, T + 1]: TEXT, PLANTED, REPEATED or BREAK.
        repeats: int64 [B, n], where the repetition of string i begins in ``tokens``.
        places: int64 [B, n], where string i begins.
        letters: of each string.
    """

    tokens: Tensor
    kinds: Tensor
    repeats: Tensor
    places: Tensor
    letters: int

    def repeated(self) -> Tensor:
        """Where the repeated letters stand among the T predicted bytes, int64 [B, n * letters]."""
        steps = torch.arange(self.letters, device=self.repeats.device)
        return (self.repeats[..., None] + steps - 1).flatten(1)

    def rows(self, first: int, count: int) -> Texts:
        """Some of the texts."""
        part = slice(first, first + count)
        return Texts(self.tokens[part], self.kinds[part], self.repeats[part], self.places[part], self.letters)


def draw_texts(
    source: Tensor,
    count: int,
    context: int,
    strings: int,
    letters: int,
    seed: int,
    reach: float = 0.5,
    even: bool = False,
) -> Texts:
    """``count`` texts from random places of ``source``, a function of the other arguments and ``seed`` alone.

    In each text ``strings`` lines of ``letters`` random letters replace what stands there, each at a random place of
    its share of the first ``reach`` of the text; the last lines of the text repeat them in a random order.

    Args:
        source: uint8 [num_bytes], on the device where the texts are wanted.
        reach: part of the text, up to where the repetitions begin where that comes first.
        even: plant each string at the beginning of its share, for depths that are equal in all texts.

    Raises:
        ValueError: the text is too short for the strings, or the source for the text.
    """
    length = context + 1
    tail = strings * (letters + 1) + 1
    share = int(min(reach * context, length - tail)) // max(strings, 1)
    if share < letters + 2 or source.numel() <= length:
        raise ValueError(
            f"{strings} strings of {letters} letters need a longer text than {context} bytes, "
            f"of {source.numel()} in all"
        )
    device, generator = source.device, torch.Generator().manual_seed(seed)
    starts = torch.randint(source.numel() - length, (count, 1), generator=generator)
    words = torch.randint(*LETTER, (count, strings, letters), generator=generator)
    offsets = torch.randint(share - letters - 1, (count, strings), generator=generator)
    order = torch.rand(count, strings, generator=generator).argsort(1)
    starts, words, order, offsets = (_send(x, device) for x in (starts, words, order, offsets))
    tokens = source[starts + torch.arange(length, device=device)].long()
    kinds = torch.zeros_like(tokens, dtype=torch.uint8)

    places = (
        share * torch.arange(strings, device=device) + 1 + (torch.zeros_like(offsets) if even else offsets)
    )
    lines = _with_breaks(words, before=True)
    where = (places[..., None] - 1 + torch.arange(letters + 2, device=device)).flatten(1)
    tokens.scatter_(1, where, lines.flatten(1))
    kinds.scatter_(1, where, _kinds_of(lines, PLANTED).flatten(1))

    again = _with_breaks(words.gather(1, order[..., None].expand_as(words)), before=False)
    tokens[:, length - tail] = NEWLINE
    kinds[:, length - tail] = BREAK
    tokens[:, length - tail + 1 :] = again.flatten(1)
    kinds[:, length - tail + 1 :] = _kinds_of(again, REPEATED).flatten(1)
    repeats = length - tail + 1 + order.argsort(1) * (letters + 1)
    return Texts(tokens, kinds, repeats, places, letters)


def _send(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on the device, without waiting for it: from pageable memory a copy would."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _with_breaks(words: Tensor, before: bool) -> Tensor:
    """Words [B, n, letters] as lines: a line break behind each and, if wanted, before it."""
    line_break = words.new_full((*words.shape[:2], 1), NEWLINE)
    return torch.cat(((line_break,) if before else ()) + (words, line_break), dim=2)


def _kinds_of(lines: Tensor, kind: int) -> Tensor:
    """``kind`` for the letters, BREAK for the line breaks."""
    return torch.where(lines == NEWLINE, BREAK, kind).to(torch.uint8)
