"""Either side's objects work in the other's call, and refusals read alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer import Peer, load_peer
from strategies import POISON, assert_same_words, clone, plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels import checks

pytestmark = pytest.mark.peer
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def peer() -> Peer:
    return load_peer()


def recast(value: Any, peer: Peer) -> Any:
    """The same tensors in the peer's classes."""
    classes = {
        "VerifyPlan": peer.verify.VerifyPlan,
        "WritePlan": peer.write.WritePlan,
        "VerifyOrWriteContext": peer.verify.VerifyOrWriteContext,
        "RealKvSource": peer.verify.RealKvSource,
    }
    theirs = classes[type(value).__name__]
    parts = {name: getattr(value, name) for name in theirs.__dataclass_fields__}  # the chain is ours alone
    if "real_kv_sources" in parts:
        parts["real_kv_sources"] = tuple(recast(source, peer) for source in parts["real_kv_sources"])
    return theirs(**parts)


@pytest.mark.parametrize("seed", range(20))
def test_plans_of_either_side(peer: Peer, seed: int) -> None:
    case = plan_case(seed)
    want = case.run(kernels.launch_canary_plan_kernels)
    for launch, plans in (
        (peer.plan_api.launch_canary_plan_kernels, case.outputs()),
        (kernels.launch_canary_plan_kernels, tuple(recast(plan, peer) for plan in case.outputs())),
    ):
        launch(verify_plan_out=plans[0], write_plan_out=plans[1], **case.inputs)
        for got, wanted in zip(plans, want, strict=True):
            assert_same_words(got, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_contexts_of_either_side(peer: Peer, seed: int) -> None:
    write = write_case(seed)
    want = write.run(kernels.launch_canary_write_kernel)
    assert_same_words(write.run(peer.write.launch_canary_write_kernel), want)
    context = recast(clone(write.context), peer)
    kernels.launch_canary_write_kernel(context=context, plan=recast(write.plan, peer), **write.inputs)
    assert_same_words(context, want)

    verify = verify_case(seed, kernels.launch_canary_write_kernel)
    want = verify.run(kernels.launch_canary_verify_kernel)
    assert_same_words(verify.run(peer.verify.launch_canary_verify_kernel), want)
    context = recast(clone(verify.context), peer)
    kernels.launch_canary_verify_kernel(
        context=context,
        plan=recast(verify.plan, peer),
        check_verify_expected_token=verify.check_verify_expected_token,
    )
    assert_same_words(context, want)


def test_words_and_names_are_the_peers(peer: Peer) -> None:
    """Enums, allocations and parameter names."""
    import inspect

    assert {tag.name: int(tag) for tag in kernels.CanaryLaunchTag} == {
        tag.name: int(tag) for tag in peer.verify.CanaryLaunchTag
    }
    for ours, theirs in ((kernels.VerifyPlan, peer.verify.VerifyPlan), (kernels.WritePlan, peer.write.WritePlan)):
        assert ours.__slots__ == theirs.__slots__
        assert [ours.allocation_bytes(n) for n in (1, 7)] == [theirs.allocation_bytes(n) for n in (1, 7)]
    ours_of = inspect.signature(kernels.launch_canary_plan_kernels).parameters
    theirs_of = inspect.signature(peer.plan_api.launch_canary_plan_kernels).parameters
    assert [name for name in ours_of if name in theirs_of] == list(theirs_of)
    for name, module in (("launch_plan_offsets_kernel", peer.offsets_kernel),):
        wanted = list(inspect.signature(getattr(module, name)).parameters)
        assert list(inspect.signature(getattr(kernels, name)).parameters)[: len(wanted)] == wanted


# --- refusals, by planting one or two faults --------------------------------------------------------------------------


def _messages(*calls: Any) -> list[str]:
    said = []
    for call in calls:
        with pytest.raises(ValueError, match="kv-canary: ") as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    "changed",
    [
        {"page_size": 0},
        {"num_bytes_per_token": 0},
        {"num_bytes_per_token": 24},
        {"read_bytes": 0},
        {"read_bytes": 8},
        {"read_bytes": 48},
        {"tensor": torch.zeros(4)},
        {"tensor": torch.zeros(4, 33, dtype=torch.uint8)},
        {"tensor": torch.zeros(4, 16, dtype=torch.bfloat16), "page_size": 2},
        {"page_size": 0, "read_bytes": 0},
        {"num_bytes_per_token": 20, "read_bytes": 99},
    ],
    ids=str,
)
def test_sources_are_refused_alike(peer: Peer, changed: dict[str, Any]) -> None:
    good = {
        "tensor": torch.zeros(4, 64, dtype=torch.uint8),
        "page_size": 1,
        "num_bytes_per_token": 32,
        "read_bytes": 16,
    }
    ours, theirs = _messages(
        lambda: kernels.RealKvSource(**good | changed), lambda: peer.verify.RealKvSource(**good | changed)
    )
    assert ours == theirs


@pytest.mark.parametrize("capacity", [0, -3])
def test_allocations_are_refused_alike(peer: Peer, capacity: int) -> None:
    for ours, theirs, name in (
        (kernels.VerifyPlan, peer.verify.VerifyPlan, "verify_capacity"),
        (kernels.WritePlan, peer.write.WritePlan, "write_req_capacity"),
    ):
        arguments = {name: capacity, "device": CPU}
        said = _messages(lambda c=ours, a=arguments: c.allocate(**a), lambda c=theirs, a=arguments: c.allocate(**a))
        assert said[0] == said[1]


def _offsets_arguments() -> dict[str, Any]:
    def long(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON)

    return {
        "req_pool_indices": torch.tensor([1, 2]),
        "prefix_lens": torch.tensor([1, 2]),
        "extend_seq_lens": torch.tensor([1, 1]),
        "req_to_token": torch.ones(4, 6, dtype=torch.int32),
        "full_to_swa_index_mapping": torch.arange(5),
        "out_verify_offsets_scratch": long(4097),
        "out_write_offsets": long(4),
        "out_write_seed_slot_indices": long(3),
        "out_verify_num_valid": torch.full((1,), 7, dtype=torch.int32),
        "out_verify_enable": torch.full((1,), 7, dtype=torch.int32),
        "out_write_num_valid_reqs": torch.full((1,), 7, dtype=torch.int32),
    }


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


_FAULTS = {
    "strided": _strided,
    "float": lambda tensor: tensor.to(torch.float32),
    "narrow": lambda tensor: tensor.to(torch.int16),
    "longer": lambda tensor: torch.cat((tensor, tensor[:1])),
    "shorter": lambda tensor: tensor[:-1].clone(),
    "empty": lambda tensor: tensor[:0].clone(),
    "deeper": lambda tensor: tensor[None].clone(),
    "elsewhere": lambda tensor: tensor.to("meta"),
}
_FITS = {  # not a fault there (one word is contiguous whatever its stride)
    ("strided", "out_verify_num_valid"),
    ("strided", "out_verify_enable"),
    ("strided", "out_write_num_valid_reqs"),
    ("longer", "out_verify_offsets_scratch"),
    ("longer", "full_to_swa_index_mapping"),
    ("shorter", "full_to_swa_index_mapping"),
    ("longer", "req_to_token"),
    ("shorter", "req_to_token"),
    ("empty", "req_to_token"),
}
_NAMES = list(_offsets_arguments())
_SINGLE = [((fault, name),) for fault in _FAULTS for name in _NAMES if (fault, name) not in _FITS]
_DOUBLE = [(first, second) for (first,) in _SINGLE[::5] for (second,) in _SINGLE[::7] if first[1] != second[1]]


def _peer_validates(peer: Peer, arguments: dict[str, Any]) -> None:
    """The peer's checks of its offsets launcher, which stand before its kernel."""
    rest = {name: value for name, value in arguments.items() if name != "full_to_swa_index_mapping"}
    lut = arguments["full_to_swa_index_mapping"]
    peer.offsets_kernel._validate_offsets_kernel_inputs(
        **rest,
        lut_tensor=lut,
        bs=arguments["req_pool_indices"].shape[0],
        req_to_token_stride0=arguments["req_to_token"].stride(0),
        lut_len=lut.shape[0],
        has_swa_lut=True,
        write_offsets_len=arguments["out_write_offsets"].shape[0],
        write_req_capacity=arguments["out_write_seed_slot_indices"].shape[0],
        verify_capacity=8,
    )


@pytest.mark.parametrize("faults", _SINGLE + _DOUBLE, ids=lambda faults: "+".join(map("-".join, faults)))
def test_offsets_launcher_refuses_alike(peer: Peer, faults: tuple[tuple[str, str], ...]) -> None:
    """The same sentence for every fault, the same one first where there are two, and outputs untouched."""
    arguments = _offsets_arguments()
    for fault, name in faults:
        arguments[name] = _FAULTS[fault](arguments[name])
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    ours, theirs = _messages(
        lambda: kernels.launch_plan_offsets_kernel(**arguments, swa_window_size=2, verify_capacity=8),
        lambda: _peer_validates(peer, arguments),
    )
    assert ours == theirs
    for name, tensor in arguments.items():
        if tensor.device == CPU:
            assert torch.equal(tensor, before[name]), name


def test_row_limits_are_refused_alike(peer: Peer) -> None:
    arguments = _offsets_arguments()
    many = {"req_pool_indices": 4097, "prefix_lens": 4097, "extend_seq_lens": 4097}
    for changed in (
        {name: torch.ones(length, dtype=torch.int64) for name, length in many.items()},
        {name: torch.ones(4, dtype=torch.int64) for name in many},
    ):
        ours, theirs = _messages(
            lambda a=arguments | changed: kernels.launch_plan_offsets_kernel(**a, swa_window_size=2, verify_capacity=8),
            lambda a=arguments | changed: _peer_validates(peer, a),
        )
        assert ours == theirs


def test_notes_say_what_to_do() -> None:
    error = checks.refusal("bs=9 exceeds write_req_capacity=8", "split the batch")
    assert str(error) == "kv-canary: bs=9 exceeds write_req_capacity=8"
    assert getattr(error, "__notes__", ["split the batch"]) == ["split the batch"]
