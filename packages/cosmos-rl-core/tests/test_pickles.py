"""Pickles of arrays and tensors are read; whatever else a pickle asks for is refused before it runs, and named."""

import contextlib
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.pickles import PROGRAM, read_array

PROTOCOLS = (2, 3, 4, 5)
FLOATS = arrays.arrays(
    st.sampled_from(["<f4", ">f8", "<f2", "<i8", "|u1", "|b1"]), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0)
)


FROM_BUFFER = b"cnumpy._core.numeric\n_frombuffer\n"


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def first(content, *, protocol=4):
    return read_array(pickle.dumps(content, protocol=protocol), name="x")


@settings(max_examples=25)  # a process each
@given(array=FLOATS, protocol=st.sampled_from(PROTOCOLS), fortran=st.booleans())
def test_any_array_comes_back(array, protocol, fortran):
    array = np.asfortranarray(array) if fortran else array
    read = first([array], protocol=protocol)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back(dtype, protocol):
    tensor = (torch.arange(24) % 2 + torch.arange(24) // 2).to(dtype).reshape(4, 6)
    for view in (tensor, tensor.t(), tensor[1:, ::2], tensor[:0], tensor[2, 3]):
        read = first([view, tensor], protocol=protocol)
        np.testing.assert_array_equal(read, view.numpy())
        assert read.dtype == view.numpy().dtype


def test_bfloat16_is_widened_exactly():
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    np.testing.assert_array_equal(first(tensor), tensor.float().numpy())
    np.testing.assert_array_equal(first(tensor[1:, ::2]), tensor[1:, ::2].float().numpy())


@pytest.mark.parametrize(
    "content",
    [
        torch.nn.Parameter(torch.ones(2)),
        {"a": (torch.ones(2), "text", 3, None), "b": [np.zeros(1)]},
        [{0: np.ones(2), "other": {"deep": [1.5, 2**70, b"bytes", True]}}],
    ],
    ids=["a parameter", "a dict", "a list"],
)
def test_the_first_array_of_what_holds_it_comes_back(content):
    np.testing.assert_array_equal(first(content), np.ones(2))


def test_many_arrays_are_within_the_limits():
    assert first([np.ones((4, 4)) for _ in range(500)]).sum() == 16


def hostile(path):
    """Pickles that create the file `path` when they are loaded as pickles usually are, by what they ask for first."""
    writes = f"open({str(path)!r}, 'w').close()"
    array = np.arange(3)
    in_state = Calls(np.frombuffer, array.tobytes(), Calls(eval, f"[{writes}, 'u1'][1]"))
    chain = b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n(S'os'\ntRS'mkdir'\ntR(S'%s'\ntR." % str(path).encode()
    return {
        "posix.system": pickle.dumps(Calls(os.system, f"touch {path}")),
        "builtins.eval": pickle.dumps(Calls(eval, writes)),
        r"builtins\.exec": pickle.dumps([array, {"deep": (array, [Calls(exec, writes)])}]),
        "numpy.frombuffer": pickle.dumps(in_state),
        "builtins.getattr": chain,
    }


@pytest.mark.parametrize("asks", hostile("x"))
def test_a_hostile_pickle_is_refused_and_named_and_nothing_ran(asks, tmp_path):
    trace = tmp_path / "trace"
    with pytest.raises(UserError, match=rf"evil\.pickle: refused: the pickle asks for {asks};"):
        read_array(hostile(trace)[asks], name="evil.pickle")
    assert not trace.exists()


@pytest.mark.parametrize("asks", hostile("x"))
def test_the_same_pickle_does_harm_where_it_is_trusted(asks, tmp_path):
    trace = tmp_path / "trace"
    pickle.loads(hostile(trace)[asks])
    assert trace.exists()


def test_a_hostile_pickle_inside_of_a_storage_is_refused(tmp_path):
    trace = tmp_path / "trace"
    head = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    storage = head + pickle.dumps(Calls(exec, f"open({str(trace)!r}, 'w').close()"), protocol=2)
    with pytest.raises(UserError, match=r"asks for (builtins|__builtin__)\.exec"):
        first(
            Calls(
                torch._utils._rebuild_tensor_v2,
                Calls(torch.storage._load_from_bytes, storage),
                *(0, (1,), (1,), False, OrderedDict()),
            )
        )
    assert not trace.exists()


@pytest.mark.parametrize(
    ("data", "asks"),
    [
        (pickle.dumps(np.array([1, "a"], dtype=object)), "an array of 'O8'"),
        (b"\x80\x02X\x01\x00\x00\x00a.", "holds no array but a str"),
        (b"I1\n.", "holds no array but a int"),
        (pickle.dumps(np.zeros(2, [("a", "f4")])), "an array of 'V4'"),
        (
            pickle.dumps(torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)),
            r"torch._utils._rebuild_sparse",
        ),
        (b"cnumpy\nndarray\n}C\x01xK\x01sb.", "the state of numpy.ndarray"),
        (b"cnumpy\nndarray\n}\x8c\x01xK\x01sb.", "the state of numpy.ndarray"),
        (b"cnumpy\ndtype\nN}\x8c\x05_nameK\x01s\x86b.", "the state of numpy.dtype"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K\x02\x85K\x01\x85\x89NtR.", "a tensor without a storage"),
        (
            b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85C\x01b\x87R.",
            "asks for numpy._core.multiarray._reconstruct as an array",
        ),
        (b"(\x8c\x04trueios\nsystem\n.", "asks for os.system"),
        (b"\x80\x02\x82\x01.", "unregistered extension code"),
        (FROM_BUFFER + b"(C\x00cnumpy\ndtype\n\x8c\x09f4,(2)f4,\x85R)\x8c\x01CtR.", "an array of 'f4"),
        (pickle.dumps(slice(1)), "builtins.slice"),
    ],
    ids=lambda value: (
        "pickle" if isinstance(value, bytes) else value
    ),  # a sparse tensor's bytes differ between processes
)
def test_what_is_no_plain_array_is_refused(data, asks):
    with pytest.raises(UserError, match=asks):
        read_array(data, name="x")


def test_a_tensor_cannot_look_beyond_its_storage():
    data = pickle.dumps(torch.zeros(4), protocol=4)
    assert data.count(b"K\x04\x85") == 1  # size (4,)
    with pytest.raises(UserError, match="a tensor larger than its storage"):
        read_array(data.replace(b"K\x04\x85", b"K\x05\x85"), name="x")


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", pickle.dumps([np.zeros(9)])[:-20], b"\x80\x04]\x94h\x07."])
def test_a_damaged_pickle_is_named(data):
    with pytest.raises(UserError, match=r"broken\.pickle is damaged or no pickle of arrays"):
        read_array(data, name="broken.pickle")


@settings(max_examples=25)
@given(st.binary(max_size=64))
def test_any_bytes_give_an_answer_or_a_user_error(data):
    with contextlib.suppress(UserError):
        read_array(b"\x80\x04" + data, name="x")


def deep(levels, place=0):
    """Operations that build a tuple of 2^levels leaves out of `levels` shared ones, remembering it at `place`."""
    again = b"q%ch%c" % (place, place)
    return b")" + (again + b"\x86") * levels


def long(number):
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a%c" % len(data) + data


UINT8 = b"cnumpy\ndtype\n\x8c\x02u1\x85RK\x03\x8c\x01|\x86b"
LIMITS = r"asks for more than 1 s of processor time or \d+ MiB of memory"
BOMBS = {
    "a shared tuple": (deep(60) + b".", "holds no array but a tuple"),
    "a list that holds itself": (b"]q\x00h\x00a.", "holds no array but a list"),
    "a tuple as a key": (b"}" + deep(39) + b"Ns.", LIMITS),
    "a key that is a million tuples deep": (b"})" + b"\x85" * 1_000_000 + b"Ns.", LIMITS),
    "the name of a type": (FROM_BUFFER + b"(C\x00cnumpy\ndtype\n" + deep(60) + b"\x85R)\x8c\x01CtR.", "of objects"),
    "a shape of shared tuples": (FROM_BUFFER + b"(C\x00" + UINT8 + deep(60) + b"\x8c\x01CtR.", LIMITS),
    "a million sizes": (
        FROM_BUFFER + b"(C\x00" + UINT8 + b"(" + b"K\x01" * 1_000_000 + b"t\x8c\x01CtR.",
        "without a shape",
    ),
    "an array of other arrays": (FROM_BUFFER + b"(]q\x00h\x00a" + UINT8 + b")\x8c\x01CtR.", "an array of objects"),
    "parameters of parameters": (
        b"(" + b"ctorch._utils\n_rebuild_parameter\n" * 100_000 + b"N" + b"\x85R" * 100_000 + b".",
        "RecursionError",
    ),
    "a call": (deep(60) + b")R.", "'tuple' object is not callable"),
    "keys that collide": (b"}(" + b"".join(long(k * (2**61 - 1)) + b"N" for k in range(1, 60_000)) + b"u.", LIMITS),
    "a million lists": (b"(" + b"]" * 1_000_000 + b"t.", "holds no array but a list"),
    "the largest memo": (b"Nr\xff\xff\xff\x7f.", LIMITS),
    "the same text again": (
        b"X"
        + struct.pack("<I", 4 << 20)
        + b"x" * (4 << 20)
        + b"q\x00("
        + (FROM_BUFFER + b"(c_codecs\nencode\nh\x00\x8c\x06latin1\x86R" + UINT8 + b")\x8c\x01CtR") * 1400
        + b"t.",
        "reshape",
    ),
    "a name of large parts": (
        b"X" + struct.pack("<I", 4 << 20) + b"x" * (4 << 20) + b"q\x00q\x01(" + b"h\x00h\x01\x93" * 1400 + b"t.",
        "xxx",
    ),
}


def children_s():
    """Processor time of the child processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_soon_and_in_little_memory(bomb):
    data, says = BOMBS[bomb]
    before = children_s()
    tracemalloc.start()
    with pytest.raises(UserError, match=says):
        read_array(data, name="bomb.pickle")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert children_s() - before < 3  # seconds; without the limits some take minutes, and double with each level
    assert most < 3 * len(data) + (32 << 20)


def test_the_process_that_reads_a_pickle_can_open_no_file():
    """So that a fault of the unpickler itself does less harm."""
    program = f"""
import runpy, sys

class Stdin:
    @property
    def buffer(self):
        open("/dev/null")

sys.stdin = Stdin()
runpy.run_path({str(PROGRAM)!r})["main"]("first", "1", str(1 << 28))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Too many open files: '/dev/null'" in ended.stderr


def seeds(trace):
    """Pickles to damage: of all kinds that are read, and those that would create `trace`."""
    tensor = torch.arange(12.0).reshape(3, 4)
    content = [[np.ones((2, 3), np.float32)], {"a": tensor, "b": tensor.bfloat16()}, np.asfortranarray(np.eye(3))]
    return [pickle.dumps(held, protocol=p) for held in content for p in PROTOCOLS] + list(hostile(trace).values())


def damaged(data, draw):
    """The bytes with a few of them flipped, cut, repeated, or replaced by operations."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0 if place < len(changed):
                changed[place] ^= 1 << draw.randrange(8)
            case 1 if place < len(changed):
                changed[place] = draw.choice(b"(.0122]})\x85\x86\x87\x94hqRbsuate\x93cBCX\x8a\x8b")
            case 2:
                del changed[place:]
            case 3:
                del changed[place : place + draw.randrange(1, 9)]
            case _:
                start = draw.randrange(len(changed) + 1)
                changed[place:place] = changed[start : start + draw.randrange(40)]
    return bytes(changed)


def fuzz(count, trace):
    draw, whole, outcomes = random.Random(0), seeds(trace), Counter()
    for _ in range(count):
        try:
            read_array(damaged(draw.choice(whole), draw), name="x")
            outcomes["read"] += 1
        except UserError as error:
            outcomes["refused" if "refused" in str(error) else "damaged"] += 1
    assert not trace.exists()
    assert outcomes.total() == count
    return outcomes


def test_damaged_pickles_are_read_or_refused(tmp_path):
    assert len(fuzz(60, tmp_path / "trace")) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)  # a process for each
def test_2_000_damaged_pickles_are_read_or_refused(tmp_path):
    outcomes = fuzz(2_000, tmp_path / "trace")
    print(dict(outcomes))
    assert min(outcomes["read"], outcomes["refused"], outcomes["damaged"]) > 100
