"""The filter of system calls, as a program of classic BPF, for x86_64 and aarch64.

Refused with EPERM: sockets, processes, other programs, mounts, kernel interfaces, memory that no limit counts, and
changes of files that Landlock does not see. The kernel runs the filter with each call; a process cannot remove it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

DENIED = """
socket:41:198 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 sendmsg:46:211 sendmmsg:307:269
fork:57:- vfork:58:- execve:59:221 execveat:322:281
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 kcmp:312:272
pidfd_open:434:434 pidfd_getfd:438:438 setpriority:141:140 ioprio_set:251:30
sched_setscheduler:144:119 sched_setattr:314:274
mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430
fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 swapon:167:224 swapoff:168:225
unshare:272:97 setns:308:268 reboot:169:142 sethostname:170:161 setdomainname:171:162 acct:163:89 quotactl:179:60
quotactl_fd:443:443 syslog:103:116 settimeofday:164:170 clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266
init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294
bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 keyctl:250:219 add_key:248:217 request_key:249:218
io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427 fanotify_init:300:262
iopl:172:- ioperm:173:- modify_ldt:154:- uselib:134:- personality:135:92 vhangup:153:58 nfsservctl:180:42
lookup_dcookie:212:18 name_to_handle_at:303:264 open_by_handle_at:304:265
chmod:90:- fchmod:91:52 fchmodat:268:53 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 truncate:76:45
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
utime:132:- utimes:235:- utimensat:280:88 futimesat:261:-
memfd_create:319:279 memfd_secret:447:447 shmget:29:194 shmat:30:196 semget:64:190 msgget:68:186 mq_open:240:180
mlock:149:228 mlock2:325:284 mlockall:151:230 migrate_pages:256:238 move_pages:279:239
"""
"""name:x86_64:aarch64; "-" is none."""
SIGNALS = """
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_send_signal:424:424
prlimit64:302:261
"""
"""Refused too where the process has no namespace of processes."""
CONDITIONAL = "clone:56:220 clone3:435:435 sendto:44:206"
LAST_KNOWN = 450
"""Newer calls do not exist for the process, whatever they do."""
_ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
"""The kernel's number of the architecture, and the place of its numbers above."""
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020080
_SET_SECCOMP, _FILTER = 22, 2


def calls(table: str, machine: str) -> dict[str, int]:
    """Return the numbers of a table's system calls."""
    place = _ARCHITECTURES[machine][1]
    words = [entry.split(":") for entry in table.split()]
    return {word[0]: int(word[place]) for word in words if word[place] != "-"}


def program(machine: str, *, denies_signals: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter`. Raises OSError for another architecture."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"there is no filter for {machine}")
    refuse, absent = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    allow, some = (_RETURN, 0, 0, _ALLOW), calls(CONDITIONAL, machine)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine][0]),
        (_RETURN, 0, 0, _KILL),  # calls of 32 bits have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_ABOVE, 0, 1, LAST_KNOWN),  # those of x32 too
        absent,
        (_JUMP_EQUAL, 0, 1, some["clone3"]),  # its flags are in memory; the C library then calls clone
        absent,
        (_JUMP_EQUAL, 0, 5, some["clone"]),  # a thread in the same namespaces, and nothing else
        (_LOAD, 0, 0, _ARGUMENTS),
        (_AND, 0, 0, _THREAD | _NEW_NAMESPACES),
        (_JUMP_EQUAL, 0, 1, _THREAD),
        allow,
        refuse,
        (_JUMP_EQUAL, 0, 6, some["sendto"]),  # without an address: asyncio's own pair of sockets
        (_LOAD, 0, 0, _ARGUMENTS + 4 * 8),
        (_JUMP_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _ARGUMENTS + 4 * 8 + 4),
        (_JUMP_EQUAL, 0, 1, 0),
        allow,
        refuse,
    ]
    for number in calls(DENIED + SIGNALS * denies_signals, machine).values():
        lines += [(_JUMP_EQUAL, 0, 1, number), refuse]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, allow])


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def install(libc: ctypes.CDLL, *, denies_signals: bool) -> None:
    """Filter the calls of this thread and of all that it starts. Needs no_new_privs. Raises OSError."""
    lines = program(platform.machine(), denies_signals=denies_signals)
    if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines) // 8, lines)), 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"the filter of system calls is refused: {os.strerror(code)}")
