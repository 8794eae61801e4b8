"""What a rollout function may bring beside its ids: rows of several conversations, and the routing of its tokens.

Chains: a rollout that went on from its summaries is one row to TRL, so that its group, its reward and the normalisation of its
loss stay those of one rollout. Its completion is then every id after the first prompt, later prompts included, without loss. The
model, though, saw one conversation at a time, and so does every forward that scores the row (``packed_rows``).

Router replay: training uses the experts to which the generation engine sent each token, since a rounding error is enough for
another choice, which is another network. Replayed, token x of a router with logits s goes to the engine's experts I, with
weights from the logits at hand and with their gradient, by the model's own formula. For softmax routers it is
y = sum_{i in I} g_i E_i(x), g_i = exp(s_i) / sum_{j in I} exp(s_j).
Reference: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (2510.11370), section 4.

Letters: B rows, P prompt columns, T completion columns, W = P + T columns, S the most later conversations that a row has; L
routers of the model, K experts a token, E experts of a router, N tokens of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from trl.trainer.utils import pad

from composer_replication.errors import InputError
from composer_replication.trainer.generation import ROUTED_EXPERTS, SEGMENT_STARTS, temporarily
from composer_replication.trainer.model_modes import inner_model

Ids = Sequence[int]
_ROUTING = "give, for each row, (tokens, layers, experts a token) over prompt_ids and completion_ids, "
_ROUTING += "-1 where the routing is unknown."
UNKNOWN = -1
"""In the place of K experts: there the router chooses itself."""


class CheckedRollouts:
    """The user's rollout function, whose completions are looked at before TRL takes their last token.

    Its column ``segment_starts``, where it has one, says which rows are chains of conversations, and ``routed_experts`` which
    experts its tokens went to (below).
    """

    def __init__(self, rollout_func: Callable[..., dict[str, Any]]) -> None:
        self.rollout_func = rollout_func

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = dict(self.rollout_func(prompts, trainer))
        completion_ids = output.get("completion_ids", ())
        empty = [number for number, ids in enumerate(completion_ids) if len(ids) == 0]
        if empty:  # there would be no last token, and no probability to learn
            words = f"{len(empty)} of {len(completion_ids)} completions are empty, the first is number {empty[0]}."
            fix = "give at least the end token for an answer that says nothing."
            raise InputError("CR0777", words, where="the rollout function", fix=fix)
        starts, routing = output.pop(SEGMENT_STARTS, None), output.pop(ROUTED_EXPERTS, None)
        if routing is not None and any(starts or ()):
            raise _refusal("a row is a chain of conversations (segment_starts)")
        if starts is not None:
            rows = [torch.tensor(each, dtype=torch.long) for each in starts]  # filled up with 0
            trainer.generation.starts_BS = pad_sequence(rows, True).to(trainer.accelerator.device)
        if routing is not None and trainer.model.training:  # in evaluation it is not used
            ids, multiple = (output.get("prompt_ids", ()), completion_ids), trainer.pad_to_multiple_of
            trainer.generation.routing_BWLK = laid_out(routing, *ids, pad_to_multiple_of=multiple)
        return output


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order of its layers; none where transformers does not name them.
    Each gives its logits, the weights of the chosen experts, and which they are.
    """
    recorder = (getattr(inner_model(model), "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None or getattr(recorder, "index", None) != 0:
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def counting_load(trainer: Any, model: nn.Module) -> Iterator[None]:
    """How evenly the routers of ``model`` choose inside: afterwards the metric ``router/max_load`` of this process.

    It is the largest E p of any layer, p being the share of an expert in its layer's choices: 1 is even, E one expert alone.
    Every token that the forwards read counts, padding too.
    """
    chosen: dict[nn.Module, Tensor] = {}

    def count(router: nn.Module, _inputs: Any, output: Any) -> None:
        logits_NE, _, index_NK = output
        chosen_E = torch.bincount(index_NK.detach().flatten(), minlength=logits_NE.size(-1))
        chosen[router] = chosen_E + chosen.get(router, 0)

    with ExitStack() as stack:
        for router in routers_of(model):
            stack.callback(router.register_forward_hook(count).remove)
        yield
    if chosen:
        loads = [chosen_E.max() * chosen_E.numel() / chosen_E.sum() for chosen_E in chosen.values()]
        trainer._metrics["train"]["router/max_load"].append(float(max(loads)))  # noqa: SLF001 - TRL's only name


def _refusal(problem: str) -> InputError:
    """The error for a routing that cannot be replayed."""
    words = f"{ROUTED_EXPERTS} cannot be replayed: {problem}."
    return InputError("CR0777", words, where=f"the rollout function's {ROUTED_EXPERTS}", fix=_ROUTING)


def laid_out(
    routing: Sequence[Any],
    prompt_ids: Sequence[Ids],
    completion_ids: Sequence[Ids],
    *,
    pad_to_multiple_of: int | None = None,
) -> Tensor | None:
    """The rows in the columns of TRL's batch: (B, P + T, L, K); None where nothing is known of any.

    ``routing`` has for each row an array, a tensor or nested lists; None for a row of which nothing is known. A row has P + T
    places, or P + T - 1: engines do not read the last token that they sampled, and what they give for it, if anything, is not
    looked at. Its layers are those with experts; each choice is -1 throughout or K different experts. Prompts are padded on
    the left, completions on the right, with -1. Ids are those before padding.
    """
    if len(routing) != len(completion_ids):
        raise _refusal(f"there are {len(routing)} arrays for {len(completion_ids)} completions")
    lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
    rows = [None if each is None else _choices(each, row, lengths[row]) for row, each in enumerate(routing)]
    sizes = sorted({tuple(each.shape[1:]) for each in rows if each is not None})
    if len(sizes) > 1:
        raise _refusal(f"rows have layers and experts a token of different numbers: {sizes}")
    if not sizes:
        return None
    prompts, completions = [], []
    for prompt, length, choices_SLK in zip(prompt_ids, lengths, rows, strict=True):
        laid_SLK = torch.full((length, *sizes[0]), UNKNOWN, dtype=torch.int16)
        if choices_SLK is not None:
            laid_SLK[:-1] = choices_SLK
        prompts.append(laid_SLK[: len(prompt)])
        completions.append(laid_SLK[len(prompt) :])
    options: dict[str, Any] = {"padding_value": UNKNOWN, "pad_to_multiple_of": pad_to_multiple_of}
    parts = pad(prompts, padding_side="left", **options), pad(completions, padding_side="right", **options)
    return torch.cat(parts, dim=1)


def _choices(given: Any, row: int, num_tokens: int) -> Tensor:
    try:
        given_SLK = torch.as_tensor(given)
    except (TypeError, ValueError) as error:
        raise _refusal(f"row {row} is no array ({error})") from None
    is_fit = given_SLK.dim() == 3 and given_SLK.size(0) in (num_tokens, num_tokens - 1)
    if not is_fit or given_SLK.is_floating_point():
        found = f"{given_SLK.dtype} {tuple(given_SLK.shape)}"
        raise _refusal(f"row {row} is {found}, and should be whole numbers ({num_tokens}, layers, experts)")
    given_SLK = given_SLK[: num_tokens - 1].long().cpu()
    ordered_SLK = given_SLK.sort(-1).values
    is_set_SL = (ordered_SLK[..., 0] >= 0) & (ordered_SLK.diff(dim=-1) > 0).all(-1)
    for choice in given_SLK[~is_set_SL & (given_SLK != UNKNOWN).any(-1)].tolist():
        raise _refusal(f"row {row} sends a token to {choice}, which are not different experts")
    return given_SLK


_TOP_K = (torch.topk, Tensor.topk)
_MASKED_FILL = (torch.masked_fill, Tensor.masked_fill)
_CHECKPOINT_FUNCTIONS = {"_gradient_checkpointing_func", "checkpoint_fn"}
"""Where transformers' layers, and torch's ``CheckpointWrapper``, keep the function that runs them again in backward."""


class _ForcedTopK(TorchFunctionMode):
    """Inside one router, its top-k over all experts gives the forced ones, and their scores."""

    has_chosen = False
    _masked: tuple[Any, Any] = (None, None)

    def __init__(self, forced_NK: Tensor, num_experts: int) -> None:
        super().__init__()
        self.forced_NK, self.num_experts = forced_NK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _MASKED_FILL and args:
            # A choice within groups (DeepSeek) blanks the other groups' scores; a forced expert may be one of them.
            self._masked = (result, args[0])
        if func not in _TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        own_NK, forced_NK = result[1], self.forced_NK.to(result[1])
        if scores.shape != (len(forced_NK), self.num_experts) or own_NK.shape != forced_NK.shape:
            return result  # the choice of groups, say
        # Where both choose the same set it stays in the router's own order: not a bit of the sum changes.
        differs_N1 = (forced_NK.sort(-1).values != own_NK.sort(-1).values).any(-1, keepdim=True)
        is_changed_N1 = differs_N1 & (forced_NK[:, :1] != UNKNOWN)
        self.has_chosen = True
        index_NK = forced_NK.where(is_changed_N1, own_NK)
        scores = self._masked[1] if scores is self._masked[0] else scores
        return torch.return_types.topk((scores.gather(-1, index_NK), index_NK))


class Replay:
    """Replays the routing of some rows in the forwards of a model that read these rows, in order.

    ``routing_BWLK`` is as ``laid_out`` gives it, ``mask_BW`` is 1 on tokens. What routers do with padding and with the last
    token of a row, which nothing reads, stays free.
    """

    _forced_NLK: Tensor

    def __init__(self, model: nn.Module, routing_BWLK: Tensor, mask_BW: Tensor) -> None:
        self.model, self.routers = model, routers_of(model)
        num_layers, largest = routing_BWLK.size(2), int(routing_BWLK.max())
        if num_layers != len(self.routers):
            has = f"{type(inner_model(model)).__name__} has {len(self.routers)} with a router"
            raise _refusal(f"they are of {num_layers} layers, and {has}")
        if largest >= (fewest := min(map(_num_experts, self.routers))) > 0:
            raise _refusal(f"they name the expert {largest} of a router that has {fewest}")
        matters_BW = mask_BW.bool() & mask_BW.bool().roll(-1, dims=1)
        matters_BW[:, -1] = False
        forced_BWLK = routing_BWLK.to(mask_BW.device)
        self.routing_BWLK = forced_BWLK.masked_fill(~matters_BW[:, :, None, None], UNKNOWN)
        self._num_rows = 0

    @contextmanager
    def in_forwards(self) -> Iterator[None]:
        """Inside, forwards of the model are replayed; so are their layers when backward runs them again."""
        with ExitStack() as stack:
            replayed = partial(self._forward, self.model.forward)
            stack.enter_context(temporarily(self.model, forward=replayed))
            for module in self.model.modules():
                for name in vars(module).keys() & _CHECKPOINT_FUNCTIONS:
                    again = partial(self._checkpoint, vars(module)[name])
                    stack.enter_context(temporarily(module, **{name: again}))
            yield

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        routing_BWLK = self.routing_BWLK[self._num_rows : self._num_rows + len(ids)]
        self._num_rows += len(ids)
        self._forced_NLK = routing_BWLK.to(ids.device).flatten(0, 1)
        with self._forced(self._forced_NLK):
            return forward(*args, **kwargs)

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The layers of a checkpoint, whose second run, long after this context, chooses as the first."""
        forced_NLK, num_runs = self._forced_NLK, 0

        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            nonlocal num_runs
            num_runs += 1
            with nullcontext() if num_runs == 1 else self._forced(forced_NLK):
                return function(*inner_args, **inner_kwargs)

        return checkpoint(run, *args, **kwargs)

    @contextmanager
    def _forced(self, forced_NLK: Tensor) -> Iterator[None]:
        """Inside, each router takes the experts that are forced on it, or says that it chooses in another way."""
        with ExitStack() as stack:
            for number, router in enumerate(self.routers):
                forced = partial(_choose, router, router.forward, forced_NLK[:, number])
                stack.enter_context(temporarily(router, forward=forced))
            yield


def _choose(router: Any, forward: Any, forced_NK: Tensor, *args: Any, **kwargs: Any) -> Any:
    with _ForcedTopK(forced_NK, _num_experts(router)) as choice:
        output = forward(*args, **kwargs)
    if not choice.has_chosen:
        words = f"{type(router).__name__} does not choose {forced_NK.size(1)} of all its experts by one top-k, so "
        words += "this routing cannot be replayed."
        fix = "give as many experts a token as the model takes, or leave routed_experts out."
        raise InputError("CR0757", words, where=f"the rollout function's {ROUTED_EXPERTS}", fix=fix)
    return output


def _num_experts(router: nn.Module) -> int:
    """Of how many a router chooses; 0 where it does not say."""
    found = (getattr(place, "num_experts", None) for place in (router, getattr(router, "config", None)))
    return next((number for number in found if isinstance(number, int)), 0)


@contextmanager
def replaying(trainer: Any, model: nn.Module, mask_BW: Tensor, routing_BWLK: Tensor | None) -> Iterator[bool]:
    """Inside, forwards of these rows follow their routing, where ``model`` is the policy, under older weights too.
    Gives whether they do. An adapter that is off, and TRL's copy of the first one, are the reference.
    """
    is_replayed = routing_BWLK is not None and model is not trainer.ref_model
    for module in model.modules() if is_replayed else ():
        is_off = getattr(module, "disable_adapters", None)
        if isinstance(is_off, bool):  # a layer of PEFT's; all are in one state
            is_replayed = not is_off and "ref" not in module.active_adapters  # type: ignore[operator]
            break
    if routing_BWLK is None or not is_replayed:
        yield False
        return
    with Replay(model, routing_BWLK, mask_BW).in_forwards():
        yield True
