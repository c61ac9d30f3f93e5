"""One call of ONC RPC (RFC 5531) over TCP: procedure 0, which does nothing, and whose answer shows that somebody is
there. No client of NFS is needed for it, and nothing on the server changes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: The program number of NFS.
NFS_PROGRAM = 100003
#: An answer to procedure 0 has some dozen bytes; what says it has more than this is no RPC server.
LARGEST_ANSWER = 4096
#: A record's length, with the highest bit set in the last piece.
HEADER_BYTES = 4
_LAST = 0x8000_0000
_CALL, _REPLY = 0, 1
_RPC_VERSION = 2
_ACCEPTED = 0
_PROGRAM_UNAVAILABLE, _PROGRAM_MISMATCH = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server said to procedure 0."""

    #: It serves this version, or does not say otherwise.
    serves: bool
    #: The versions that it serves, where it said so.
    lowest: int | None = None
    highest: int | None = None


def build_call(xid: int, program: int, version: int) -> bytes:
    """Procedure 0 of a program, without credentials, as one record. `xid` is any number below 2**32."""
    body = struct.pack(">10I", xid, _CALL, _RPC_VERSION, program, version, 0, 0, 0, 0, 0)
    return struct.pack(">I", _LAST | len(body)) + body


def piece_length(header: bytes) -> tuple[int, bool]:
    """How many bytes follow a record's header, and whether they are its last.

    Raises:
        ValueError: no RPC server says this.
    """
    (word,) = struct.unpack(">I", header)
    length = word & ~_LAST
    if length > LARGEST_ANSWER:
        raise ValueError("the answer is no answer of RPC")
    return length, bool(word & _LAST)


def parse_answer(xid: int, body: bytes) -> Answer:
    """A whole record's bytes as an answer to the call `xid`.

    Raises:
        ValueError: it is none.
    """
    words = struct.unpack(f">{len(body) // 4}I", body[: len(body) // 4 * 4])
    if len(words) < 3 or words[0] != xid or words[1] != _REPLY:
        raise ValueError("the answer is no answer of RPC")
    if words[2] != _ACCEPTED:
        # Somebody is there, and wants credentials: that is for the mount to find out.
        return Answer(serves=True)
    verifier_words = (words[4] + 3) // 4 if len(words) > 4 else 0
    status = words[5 + verifier_words] if len(words) > 5 + verifier_words else None
    if status == _PROGRAM_MISMATCH and len(words) >= 8 + verifier_words:
        return Answer(serves=False, lowest=words[6 + verifier_words], highest=words[7 + verifier_words])
    return Answer(serves=status not in {_PROGRAM_UNAVAILABLE, _PROGRAM_MISMATCH})
