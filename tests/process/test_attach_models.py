"""Models over a real daemon's weights: what people do with them afterwards, ranks, and what a follower refuses."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ftd_client
from ftd.errors import BindError, FollowerClosedError, NoCreatorError, UsageError
from ftd_client.shm import apply_rank_suffix
from tests.process import streaming, workers
from tests.process.daemons import Daemon
from tests.process.workers import Worker
from tests.unit.client.weights import bits

Start = Callable[..., Daemon]
Workers = Callable[[], Worker]

_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: A tied table of 1 MiB, so that a second copy would show.
ROWS, WIDTH = 1024, 256


class Language(nn.Module):
    """A language model with a tied head, a layer, and a table of positions that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)])
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(ROWS), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given = self.embed(self.table[tokens])
        for layer in self.layers:
            given = layer(given)
        return self.head(given)


def reference() -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Language().requires_grad_(False).eval()


def on_meta() -> Language:
    with ftd_client.meta_parameters():
        return Language().requires_grad_(False).eval()


TOKENS = torch.arange(5)


@pytest.fixture(scope="module", params=["safetensors", "torch"])
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves a tied model: one of the names; and as torch.save does: one storage under both."""
    folder = tmp_path_factory.mktemp("language")
    state = reference().state_dict()
    if request.param == "torch":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        del state["head.weight"]
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def bound(start: Start, namespace: str, language: Path) -> Iterator[tuple[Language, ftd_client.Follower]]:
    start("--model", language)
    model = on_meta()
    with ftd_client.attach(namespace) as weights:
        weights.bind(model)
        yield model, weights


def content(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(repr(bits(tensor)).encode()).hexdigest() for name, tensor in state.items()}


EXPECTED = content(reference().state_dict())


def test_a_tie_is_one_parameter_and_one_copy(bound: tuple[Language, ftd_client.Follower]) -> None:
    """MD-04: in the segment, in this process and in whatever the model is loaded into; MD-01: with its table."""
    model, weights = bound
    assert model.head.weight is model.embed.weight
    table = ROWS * WIDTH * 4
    assert table <= sum(fact.bytes for fact in weights.manifest.segments) < 2 * table
    assert weights.manifest.tensor_bytes == sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) - ROWS * 8
    assert content(model.state_dict()) == EXPECTED
    assert torch.equal(model(TOKENS), reference()(TOKENS))
    weights.load(model, "cpu")
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(TOKENS), reference()(TOKENS))


@pytest.mark.parametrize(
    "operation",
    [
        nn.Module.half, nn.Module.double, nn.Module.cpu, copy.deepcopy, nn.Module.share_memory,
        lambda model: model.to(torch.bfloat16), lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to_empty(device="cpu"),
        pytest.param(lambda model: model.to("cuda"), marks=_ON_GPU),
    ],
)  # fmt: skip
def test_a_bound_model_can_be_converted_and_copied(
    bound: tuple[Language, ftd_client.Follower], operation: Callable[[nn.Module], nn.Module]
) -> None:
    """MD-10: each works, leaves nothing on meta and changes nothing for anybody else."""
    model, weights = bound
    made = operation(model)
    assert not any(tensor.is_meta for tensor in [*made.parameters(), *made.buffers()])
    assert made.head.weight is made.embed.weight
    with torch.no_grad():
        made.embed.weight.zero_()
    with ftd_client.attach(weights.namespace) as other:
        fresh = on_meta()
        other.bind(fresh)
        assert content(fresh.state_dict()) == EXPECTED


def test_what_is_left_on_meta_is_named(bound: tuple[Language, ftd_client.Follower]) -> None:
    """MD-10: a module that came later has no weights."""
    model, weights = bound
    model.adapter = nn.Linear(2, 2, device="meta")
    with pytest.raises(BindError, match=r"adapter\.weight: no data found \(it is on meta\)"):
        weights.load(model, "cpu")
    assert model.embed.weight.data_ptr() == weights.state_dict()["embed.weight"].data_ptr()


def test_a_bound_model_is_exported_whole(bound: tuple[Language, ftd_client.Follower], tmp_path: Path) -> None:
    """MD-11: between forwards and inside one; never a placeholder, and no page of the weights is copied for it."""
    model, weights = bound
    exported: list[dict[str, str]] = []

    def export() -> None:
        state = model.state_dict()
        exported.append(content(state))
        save_file({n: t for n, t in state.items() if n != "head.weight"}, tmp_path / "model.safetensors")
        exported.append(content(load_file(tmp_path / "model.safetensors")) | {"head.weight": EXPECTED["head.weight"]})
        buffer = io.BytesIO()
        torch.save(state, buffer)
        assert buffer.tell() < 2 * ROWS * WIDTH * 4, "the tie once, and of each tensor no more than its bytes"
        exported.append(content(torch.load(io.BytesIO(buffer.getvalue()))))
        exported.append(content(pickle.loads(pickle.dumps(model)).state_dict()))

    def inside(*_: Any) -> None:
        handle.remove()  # a local function cannot be pickled
        export()

    export()
    handle = model.layers[1].register_forward_pre_hook(inside)
    model(TOKENS)
    assert len(exported) == 8 and all(found == EXPECTED for found in exported)
    assert workers.resident(weights.namespace)["Anonymous"] == 0


@pytest.mark.parametrize("way", ["data", "numpy", "detach", "inside a forward"])
def test_a_write_stays_in_the_process_that_made_it(
    bound: tuple[Language, ftd_client.Follower], worker: Workers, way: str
) -> None:
    """MD-12: through `.data`, which torch does not count, and through numpy, which torch does not see."""
    model, weights = bound
    reader = worker()
    reader.do(workers.attach, weights.namespace)
    before = reader.do(workers.contents, weights.namespace)
    ways: dict[str, Callable[[], Any]] = {
        "data": lambda: model.layers[0].weight.data.add_(1),
        "numpy": lambda: model.layers[0].weight.numpy().__iadd__(1),
        "detach": lambda: model.layers[0].weight.detach().add_(1),
        "inside a forward": lambda: model.layers[0].weight.add_(1),
    }
    if way == "inside a forward":

        def hook(*_: Any) -> None:
            ways[way]()

        model.layers[0].register_forward_pre_hook(hook)
        model(TOKENS)
    else:
        ways[way]()
    assert torch.equal(model.layers[0].weight, reference().layers[0].weight + 1)
    assert reader.do(workers.contents, weights.namespace) == before


# --- names, types and ranks --------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A rank's part: rows of `up`, columns of `down`."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(32, inner)
        self.norm = nn.LayerNorm(32)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(given))


@pytest.fixture
def shared(start: Start, namespace: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint that names its tensors `model.*`."""
    torch.manual_seed(1)
    state = {f"model.{name}": tensor for name, tensor in Mlp(64).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    start("--model", tmp_path)
    return state


@pytest.mark.parametrize("where", ["shared memory", "cpu", pytest.param("cuda", marks=_ON_GPU)])
def test_ranks_have_their_rows_under_the_models_names(
    shared: dict[str, torch.Tensor], namespace: str, where: str
) -> None:
    for rank in range(4):
        with torch.device("meta"):
            model = Mlp(16)
        with ftd_client.attach(namespace, rank=rank, world=4) as weights:
            told: dict[str, Any] = {"key_map": {"model": ""}, "shard": {"up": 0}}
            if where == "shared memory":
                weights.bind(model, **told)
                assert model.up.weight.data_ptr() - weights.state_dict()["model.up.weight"].data_ptr() == rank * 2048
            else:
                weights.load(model, where, **told)
                assert weights.load(model, where, **told).tensors == (0 if where == "cuda" else 4), "it is bound so"
        rows = slice(16 * rank, 16 * rank + 16)
        for name, tensor in shared.items():
            expected = tensor[rows] if name.startswith("model.up") else tensor
            assert torch.equal(model.state_dict()[name.removeprefix("model.")].cpu(), expected)


def test_a_rank_touches_no_page_of_the_others(start: Start, namespace: str, tmp_path: Path, worker: Workers) -> None:
    save_file({"weight": torch.ones(4096, 1024)}, tmp_path / "model.safetensors")
    start("--model", tmp_path)
    one = worker()
    assert one.do(read_rank, namespace, 1, 4) == 1024 * 1024
    assert workers_mib(one, namespace) <= 4 + 2


def read_rank(namespace: str, rank: int, world: int) -> float:
    """Sum of what one rank has of the weight."""
    follower = workers._followers[namespace] = ftd_client.attach(namespace, rank=rank, world=world)
    with torch.device("meta"):
        model = nn.Linear(1024, 4096 // world, bias=False)
    follower.bind(model, shard={"weight": 0})
    return float(model.weight.sum())


def workers_mib(worker: Worker, namespace: str) -> float:
    return float(worker.do(workers.resident, namespace)["Rss"]) / 2**20


def test_casting_costs_memory_of_the_process_which_is_told(shared: dict[str, torch.Tensor], namespace: str) -> None:
    with torch.device("meta"):
        model = Mlp(64)
    with ftd_client.attach(namespace) as weights:
        report = weights.bind(model, key_map={"model": ""}, dtype=torch.bfloat16)
        assert (report.bound_bytes, report.cast_bytes) == (0, sum(t.nbytes for t in shared.values()) // 2)
        for name, tensor in shared.items():
            assert torch.equal(model.state_dict()[name.removeprefix("model.")], tensor.bfloat16())
        weights.load(model, "cpu")
        assert model.up.weight.dtype == torch.bfloat16
        with pytest.raises(BindError, match="of other values"):
            weights.load(model, "cpu", key_map={"model": ""}, dtype=torch.float32)


def test_a_shard_by_patterns_needs_a_rank(shared: dict[str, torch.Tensor], namespace: str) -> None:
    with torch.device("meta"):
        model = Mlp(64)
    with ftd_client.attach(namespace) as weights:
        with pytest.raises(UsageError, match="no rank"):
            weights.bind(model, shard={"model.up": 0})
        with pytest.raises(UsageError, match="no rank"):
            weights.load(model, "cpu", shard={"model.up": 0})
        assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(FollowerClosedError):
        weights.bind(model)


# --- what a follower expects -------------------------------------------------------------------------------------


def test_another_fingerprint_is_refused_and_leaves_no_lease(start: Start, namespace: str, model: Path) -> None:
    daemon = start("--model", model)
    with ftd_client.attach(namespace) as weights:
        fingerprint = weights.fingerprint
    with pytest.raises(ftd_client.OtherWeightsError, match=f"{fingerprint}, 0123 expected"):
        ftd_client.attach(namespace, fingerprint="0123")
    assert daemon.status()["followers"] == []
    with ftd_client.attach(namespace, fingerprint=fingerprint) as weights:
        assert weights.state_dict()


def test_a_namespace_of_another_rank_is_refused_before_anything_is_waited_for(namespace: str) -> None:
    name = apply_rank_suffix(namespace, 1, 0)
    with pytest.raises(ftd_client.OtherWeightsError, match="tensor parallel rank 1, rank 0 expected"):
        ftd_client.attach(name, rank=0, world=2, timeout=30)
    for rank in (1, None):
        with pytest.raises(NoCreatorError):
            ftd_client.attach(name, rank=rank, world=rank and 2, timeout=0)


@pytest.mark.parametrize(
    "place",
    [{"rank": 0}, {"world": 2}, {"rank": 2, "world": 2}, {"rank": -1, "world": 2}, {"rank": True, "world": 2},
     {"rank": 0.0, "world": 2}, {"rank": "0", "world": 2}, {"rank": 0, "world": 0}],
)  # fmt: skip
def test_a_place_among_ranks_that_is_none_is_refused(namespace: str, place: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="rank="):
        ftd_client.attach(namespace, timeout=0, **place)


# --- streamed ----------------------------------------------------------------------------------------------------

SIZE = (64, 4)


@pytest.fixture
def streamed(start: Start, tmp_path: Path) -> Iterator[None]:
    start("--model", streaming.checkpoint(tmp_path, *SIZE))
    yield
    ftd_client.release("test")


def _offload(model: nn.Module, namespace: str) -> None:
    ftd_client.offload(model, streaming.config(namespace, {}), "test", device="cpu")


def test_a_model_of_the_same_values_streams_from_shared_memory(streamed: None, namespace: str) -> None:
    """As `from_pretrained` leaves it: afterwards it holds none of its own."""
    model, expected = streaming.resident(*SIZE), streaming.resident(*SIZE)
    _offload(model, namespace)
    given = torch.ones(2, SIZE[0])
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(given), expected(given))


@pytest.mark.parametrize("change", ["value", "type"])
def test_a_model_of_other_values_is_refused_by_name_and_stays(streamed: None, namespace: str, change: str) -> None:
    model = streaming.resident(*SIZE)
    if change == "value":
        model.layers[2].up.weight[3, 3] += 1
    else:
        model.layers[2].up.weight = nn.Parameter(model.layers[2].up.weight.double(), requires_grad=False)
    before = list(model.parameters())
    with pytest.raises(BindError) as caught:
        _offload(model, namespace)
    (line,) = caught.value.problems
    assert line.startswith("layers.2.up.weight: a real parameter")
    assert "replace=True" in caught.value.remedy
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


class Rows(nn.Module):
    """Layers of which a rank has some rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE[0], rows) for _ in range(SIZE[1]))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(given) for layer in self.layers]).sum(0)


def test_a_rank_streams_its_slices(start: Start, namespace: str, tmp_path: Path) -> None:
    """Bound by a key map and a shard first: `offload` takes the model as it is bound."""
    whole = Rows(SIZE[0]).requires_grad_(False)
    save_file({f"old.{name}": tensor for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors")
    daemon = start("--model", tmp_path)
    for rank in range(2):
        with torch.device("meta"):
            model = Rows(SIZE[0] // 2).requires_grad_(False)
        with ftd_client.attach(namespace, rank=rank, world=2) as weights:
            weights.bind(model, key_map={"old": ""}, shard={"layers": 0})
        resident = copy.deepcopy(model)
        rows = slice(rank * SIZE[0] // 2, (rank + 1) * SIZE[0] // 2)
        assert all(torch.equal(p, dict(whole.named_parameters())[n][rows]) for n, p in resident.named_parameters())
        _offload(model, namespace)
        (row,) = daemon.status()["followers"]
        assert row["planned_bytes"] == sum(parameter.nbytes for parameter in resident.parameters())
        given = torch.randn(3, SIZE[0])
        for _ in range(4):
            assert torch.equal(model(given), resident(given))
        ftd_client.release("test")
        assert daemon.status()["followers"] == []
