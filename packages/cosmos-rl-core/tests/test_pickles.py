"""Pickles of arrays and tensors are read; whatever else a pickle asks for is refused before it runs, and named."""

import contextlib
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.pickles import read_pickle

PROTOCOLS = (2, 3, 4, 5)
FLOATS = arrays.arrays(
    st.sampled_from(["<f4", ">f8", "<f2", "<i8", "|u1", "|b1"]), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0)
)


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@given(array=FLOATS, protocol=st.sampled_from(PROTOCOLS), fortran=st.booleans())
def test_any_array_comes_back(array, protocol, fortran):
    array = np.asfortranarray(array) if fortran else array
    (read,) = read_pickle(pickle.dumps([array], protocol=protocol), name="x")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back(dtype, protocol):
    tensor = (torch.arange(24) % 2 + torch.arange(24) // 2).to(dtype).reshape(4, 6)
    views = [tensor, tensor.t(), tensor[1:, ::2], tensor[:0], tensor[2, 3]]
    for view, read in zip(views, read_pickle(pickle.dumps(views, protocol=protocol), name="x")):
        np.testing.assert_array_equal(read, view.numpy())
        assert read.dtype == view.numpy().dtype


def test_bfloat16_is_widened_exactly():
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    np.testing.assert_array_equal(read_pickle(pickle.dumps(tensor), name="x"), tensor.float().numpy())


def test_a_parameter_and_containers_come_back():
    content = {"a": (torch.nn.Parameter(torch.ones(2)), "text", 3, None), "b": [np.zeros(1)]}
    read = read_pickle(pickle.dumps(content), name="x")
    assert read["a"][1:] == ("text", 3, None)
    np.testing.assert_array_equal(read["a"][0], np.ones(2))


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
        read_pickle(hostile(trace)[asks], name="evil.pickle")
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
        read_pickle(pickle.dumps(Calls(torch.storage._load_from_bytes, storage)), name="x")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("data", "asks"),
    [
        (pickle.dumps(np.array([1, "a"], dtype=object)), "an array of 'O8'"),
        (pickle.dumps(np.zeros(2, [("a", "f4")])), "an array of 'V4'"),
        (
            pickle.dumps(torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)),
            r"torch._utils._rebuild_sparse",
        ),
        (b"cnumpy\nndarray\n}S'x'\nI1\nsb.", "the state of numpy.ndarray"),
        (b"cnumpy\ndtype\n(N}S'_name'\nI1\nstb.", "the state of numpy.dtype"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n(I2\nt(I1\ntI00\nNtR.", "a tensor without a storage"),
        (b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.", "an array of the class"),
        (b"(S'true'\nios\nsystem\n.", "the operation INST"),
        (b"\x80\x02\x82\x01.", "the operation EXT1"),
        (b"cnumpy\ndtype\n(S'f4,(2)f4'\ntR.", "an array of 'f4"),
        (pickle.dumps(slice(1)), "builtins.slice"),
    ],
    ids=lambda value: (
        "pickle" if isinstance(value, bytes) else value
    ),  # a sparse tensor's bytes differ between processes
)
def test_what_is_no_plain_array_is_refused(data, asks):
    with pytest.raises(UserError, match=asks):
        read_pickle(data, name="x")


def test_a_tensor_cannot_look_beyond_its_storage():
    data = pickle.dumps(torch.zeros(4), protocol=4)
    assert data.count(b"K\x04\x85") == 1  # size (4,)
    with pytest.raises(UserError, match="a tensor larger than its storage"):
        read_pickle(data.replace(b"K\x04\x85", b"K\x05\x85"), name="x")


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", pickle.dumps([np.zeros(9)])[:-20], b"\x80\x04]\x94h\x07."])
def test_a_damaged_pickle_is_named(data):
    with pytest.raises(UserError, match=r"broken\.pickle is damaged or no pickle of arrays"):
        read_pickle(data, name="broken.pickle")


@given(st.binary(max_size=64))
def test_any_bytes_give_an_answer_or_a_user_error(data):
    with contextlib.suppress(UserError):
        read_pickle(b"\x80\x04" + data, name="x")
