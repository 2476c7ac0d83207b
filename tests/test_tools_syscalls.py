"""The filter of system calls, run by a small interpreter of its own language."""

import errno
import struct

import pytest

from modpo.programs.tools.syscalls import seccomp_filter

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> str:
    """What the filter says to a call: allow, kill, or the name of the error."""
    program = seccomp_filter(machine)
    assert program is not None
    data = struct.pack("<IIQQQQQQQ", number, architecture or ARCHITECTURE[machine], 0, argument, 0, 0, 0, 0, 0)
    steps, place, register = [*struct.iter_unpack("<HBBI", program)], 0, 0
    while True:
        code, yes, no, value = steps[place]
        place += 1
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return {0x7FFF: ALLOW, 0x8000: KILL}.get(value >> 16) or errno.errorcode[value & 0xFFFF]
        else:
            hit = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            place += yes if hit else no


NAMES = ("read", "execve", "clone", "clone3", "socket", "unshare", "memfd_create")
CALLS = {
    "x86_64": dict(zip(NAMES, (0, 59, 56, 435, 41, 272, 319), strict=True)),
    "aarch64": dict(zip(NAMES, (63, 221, 220, 435, 198, 97, 279), strict=True)),
}


@pytest.mark.parametrize("machine", CALLS)
def test_each_call_gets_its_verdict(machine: str) -> None:
    calls = CALLS[machine]
    assert {name: verdict(machine, number) for name, number in calls.items()} == {
        "read": ALLOW,
        "execve": ALLOW,
        "clone": ALLOW,
        "clone3": "ENOSYS",
        "socket": "EAFNOSUPPORT",
        "unshare": "EPERM",
        "memfd_create": "EPERM",
    }
    assert [verdict(machine, calls["socket"], family) for family in (1, 2, 10)] == [ALLOW] * 3
    assert {verdict(machine, calls["socket"], family) for family in (16, 17, 38, 40)} == {"EAFNOSUPPORT"}
    assert verdict(machine, calls["clone"], 0x11) == ALLOW  # fork: SIGCHLD
    assert verdict(machine, calls["clone"], 0x3D0F00) == ALLOW  # a thread, as glibc makes it
    assert verdict(machine, calls["clone"], 0x10000011) == "EPERM"  # CLONE_NEWUSER


def test_other_numberings_are_no_way_around() -> None:
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL  # 32-bit calls
    assert verdict("x86_64", 0x40000000) == "EPERM"  # x32
    assert seccomp_filter("riscv64") is None
