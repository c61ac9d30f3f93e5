"""Asks this kernel for the security association that Docker uses for encrypted overlays; prints one line.

The caller passes this file's text to `python3 -c` in a container, so it imports nothing of gpuhub. It speaks to the
kernel itself, because the image has no `ip`. Numbers and layouts are those of linux/netlink.h and linux/xfrm.h.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

SUCCESS = "ok"
FAILURE = "error: "
_NETLINK_XFRM = 6
#: Socket options of netlink; with NETLINK_CAP_ACK the answer does not repeat the request.
_SOL_NETLINK, _NETLINK_EXT_ACK, _NETLINK_CAP_ACK = 270, 11, 10
_XFRM_MSG_NEWSA, _XFRMA_ALG_AEAD, _NLMSGERR_ATTR_MSG = 0x10, 18, 1
#: NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL and NLM_F_CREATE.
_FLAGS = 0x1 | 0x4 | 0x200 | 0x400
_ESP = 50
_UNLIMITED = 2**64 - 1
#: AES-128-GCM with the salt of four bytes, and a check value of 64 bits, as Docker's overlays use it.
_ALGORITHM, _KEY, _CHECK_BITS = b"rfc4106(gcm(aes))", bytes(range(20)), 64


def build_request() -> bytes:
    """Build the message that adds the association, in transport mode between two addresses of documentation."""
    target = socket.inet_aton("192.0.2.2").ljust(16, b"\0")
    source = socket.inet_aton("192.0.2.1").ljust(16, b"\0")
    selector = bytes(56)
    identity = target + struct.pack("!I", 0x100) + bytes([_ESP, 0, 0, 0])
    limits = struct.pack("=8Q", *[_UNLIMITED] * 4, *[0] * 4)
    # Use so far, statistics, sequence number, id, family, mode (0: transport), replay window, flags; then padding.
    rest = bytes(32 + 12) + struct.pack("=IIHBBB7x", 0, 1, socket.AF_INET, 0, 0, 0)
    algorithm = struct.pack("=64sII", _ALGORITHM, len(_KEY) * 8, _CHECK_BITS) + _KEY
    attribute = struct.pack("=HH", 4 + len(algorithm), _XFRMA_ALG_AEAD) + algorithm
    body = selector + identity + source + limits + rest + attribute
    return struct.pack("=IHHII", 16 + len(body), _XFRM_MSG_NEWSA, _FLAGS, 1, 0) + body


def read_answer(answer: bytes) -> str:
    """Return the line to print for the kernel's acknowledgement: SUCCESS, or FAILURE with the reason."""
    (number,) = struct.unpack_from("=i", answer, 16)
    if number == 0:
        return SUCCESS
    reason = os.strerror(-number)
    # After the error and the header of the request, which is not repeated, come attributes of the kernel's own words.
    position = 16 + 4 + 16
    while position + 4 <= len(answer):
        length, kind = struct.unpack_from("=HH", answer, position)
        if kind & 0x3FFF == _NLMSGERR_ATTR_MSG:
            reason = f"{answer[position + 4 : position + length].rstrip(bytes(1)).decode(errors='replace')} ({reason})"
        position += max(4, (length + 3) // 4 * 4)
    return FAILURE + reason


def main() -> None:
    """Ask, and print the answer."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_XFRM) as kernel:
            kernel.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
            kernel.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            kernel.settimeout(20)
            kernel.send(build_request())
            sys.stdout.write(read_answer(kernel.recv(8192)) + "\n")
    except OSError as error:
        sys.stdout.write(f"{FAILURE}no IPsec: {error.strerror or error}\n")


if __name__ == "__main__":
    main()
