"""What a rollout function may bring beside its ids: rows of several conversations, and the routing of its tokens.

Chains: a rollout that went on from its summaries is one row to TRL, so that its group, its reward and the normalisation of its
loss stay those of one rollout. Its completion is then every id after the first prompt, later prompts included, without loss. The
model, though, saw one conversation at a time, and so must every forward that scores the row.

Router replay: training uses the experts to which the generation engine sent each token.
With experts a rounding error is enough for another choice, and another choice is another network: sampler and trainer
then disagree about tokens by far more than rounding. Replayed, token x of a router with logits s goes to the engine's
experts I, with weights from the logits at hand and with their gradient: by the model's own formula, in which nothing but
the choice is replaced. For softmax routers it is y = sum_{i in I} g_i E_i(x), g_i = exp(s_i) / sum_{j in I} exp(s_j).
Reference: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (2510.11370), section 4.

Letters: B rows, P prompt columns, T completion columns, W = P + T columns, S the most later conversations that a row has; N rows
of one conversation that are forwarded, L their completion columns. Of routing: L routers of the model, K experts a token, E
experts of a router, N tokens of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from trl.trainer.utils import pad

from composer_replication.errors import InputError
from composer_replication.trainer.generation import ROUTED_EXPERTS, SEGMENT_STARTS, temporarily
from composer_replication.trainer.prefix_support import inner_model
from composer_replication.trainer.processes import gathered

_WHERE = "the rollout function's routed_experts"
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
            raise refusal("a row is a chain of conversations (segment_starts)")
        if starts is not None:
            if problem := _problem_of_starts(starts, completion_ids, output.get("env_mask")):
                words = f"segment_starts cannot be followed: {problem}."
                fix = "give, for each row, the places in completion_ids where the prompt of a later conversation begins."
                raise InputError("CR0777", words, where="the rollout function's segment_starts", fix=fix)
            trainer.generation.starts_BS = starts_tensor(starts).to(trainer.accelerator.device)
        if routing is not None and trainer.model.training:  # in evaluation it is not used
            routers, multiple = Routers.of(trainer.model), trainer.pad_to_multiple_of
            prompt_ids = output.get("prompt_ids", ())
            trainer.generation.routing_BWLK = laid_out(
                routing, prompt_ids, completion_ids, routers, pad_to_multiple_of=multiple
            )
        return output


def _problem_of_starts(
    starts: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None,
) -> str:
    """A later conversation begins inside its completion, after the one before, with an id that carries no loss."""
    if len(starts) != len(completion_ids):
        return f"there are {len(starts)} lists for {len(completion_ids)} completions"
    if masks is None and any(starts):
        return "there is no env_mask, and the first id of a conversation was not sampled"
    for row, (places, ids) in enumerate(zip(starts, completion_ids, strict=True)):
        if any(after <= before for before, after in pairwise([0, *places, len(ids)])):
            return f"{list(places)} of row {row} does not rise between 0 and its {len(ids)} ids"
        if masks is not None and any(masks[row][place] for place in places):
            return f"a conversation of row {row} begins with an id that carries loss"
    return ""


# ---- chains ---------------------------------------------------------------------------------------------


def one_conversation_rows(
    ids_BW: torch.Tensor,
    mask_BW: torch.Tensor,
    num_columns: int,
    starts_BS: torch.Tensor,
    *,
    num_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to forward, their mask (N, P + L), and where in the chained rows their values belong (B, T).

    The first conversation of every row keeps its place, the later ones follow below. Of a later one the first id is the
    prompt, in the last prompt column, and the rest its completion. Of the W columns the last ``num_columns`` are those of
    completions. ``starts_BS`` are completion columns at which later conversations begin, rising; 0 for none. N is at least
    ``num_rows``; the rows beyond are the first one again, and their values go nowhere.

    A place is the index of a completion position (b, t) among the N L values; -1 where there is none: padding, and the
    first id of a later conversation, which nothing stands before.
    """
    split = ids_BW.size(1) - num_columns
    lengths = mask_BW[:, split:].sum(-1).tolist()  # 0 where TRL has emptied the mask of a row that was cut
    edges = [
        [0, *(start for start in starts if 0 < start < length), int(length)]
        for starts, length in zip(starts_BS.tolist(), lengths, strict=True)
    ]
    parts = [(row, 0, of_row[1]) for row, of_row in enumerate(edges)]
    parts += [(row, start, end) for row, of_row in enumerate(edges) for start, end in pairwise(of_row[1:])]
    columns = max(1, *(end - start - bool(start) for _, start, end in parts))
    total = max(len(parts), num_rows)
    ids_NW, mask_NW = ids_BW.new_zeros(total, split + columns), mask_BW.new_zeros(total, split + columns)
    place_BT = ids_BW.new_full((len(edges), num_columns), -1)
    for number, (row, start, end) in enumerate(parts):
        source, target = (split + start, split - 1) if start else (0, 0)
        for rows_NW, from_BW in ((ids_NW, ids_BW), (mask_NW, mask_BW)):
            rows_NW[number, target : target + split + end - source] = from_BW[row, source : split + end]
        first = start + 1 if start else 0  # of a later conversation the first id is the prompt
        place_BT[row, first:end] = torch.arange(number * columns, number * columns + end - first)
    ids_NW[len(parts) :], mask_NW[len(parts) :] = ids_NW[0], mask_NW[0]
    return ids_NW, mask_NW, place_BT


def chained(values_NL: torch.Tensor, place_BT: torch.Tensor) -> torch.Tensor:
    """The values of forwarded rows as those (B, T) of the chained ones; 0 where there is none."""
    return values_NL.reshape(-1)[place_BT.clamp(min=0)].masked_fill(place_BT < 0, 0.0)


def starts_tensor(starts: Sequence[Sequence[int]]) -> torch.Tensor:
    """One line a row, filled up with 0: (B, S)."""
    return pad_sequence([torch.tensor(each, dtype=torch.long) for each in starts], batch_first=True)


Answer = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Scorer = Callable[[torch.Tensor, torch.Tensor, int], Answer]


def score_chains(
    score: Scorer,
    ids_BW: torch.Tensor,
    mask_BW: torch.Tensor,
    num_columns: int,
    starts_BS: torch.Tensor | None,
) -> Answer:
    """``score(ids, mask, columns)`` of rows of one conversation each; the values are those of the rows given."""
    if starts_BS is None:
        return score(ids_BW, mask_BW, num_columns)
    # Every process forwards as many rows as the others: sharded weights are gathered in each forward.
    num_rows = max(gathered(ids_BW.size(0) + int((starts_BS > 0).sum())))
    if num_rows == ids_BW.size(0):
        return score(ids_BW, mask_BW, num_columns)
    ids_NW, mask_NW, place_BT = one_conversation_rows(
        ids_BW, mask_BW, num_columns, starts_BS, num_rows=num_rows
    )
    num_prompt = ids_BW.size(1) - num_columns
    logps_NL, entropies_NL, aux_loss = score(ids_NW, mask_NW, ids_NW.size(1) - num_prompt)
    entropies_BT = None if entropies_NL is None else chained(entropies_NL, place_BT)
    return chained(logps_NL, place_BT), entropies_BT, aux_loss


# ---- routing --------------------------------------------------------------------------------------------


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
    """How evenly the routers of ``model`` choose inside: afterwards the metric ``router/max_load``, over all processes.

    Every token that its forwards read counts, padding too. Nothing where layers have different numbers of experts, or one did
    not run: the same on each process.
    """
    routers = routers_of(model)
    chosen: dict[nn.Module, torch.Tensor] = {}

    def count(router: nn.Module, _inputs: Any, output: Any) -> None:
        logits_NE, _, index_NK = output
        chosen_E = torch.bincount(index_NK.detach().flatten(), minlength=logits_NE.size(-1))
        chosen[router] = chosen_E + chosen.get(router, 0)

    with ExitStack() as stack:
        for router in routers:
            stack.callback(router.register_forward_hook(count).remove)
        yield
    if len(chosen) == len(routers) and len({counts.numel() for counts in chosen.values()}) == 1:
        chosen_LE = trainer.accelerator.reduce(torch.stack(list(chosen.values())), reduction="sum")
        trainer._metrics["train"]["router/max_load"].append(largest_load(chosen_LE))  # noqa: SLF001 - TRL's only name


def largest_load(chosen_LE: torch.Tensor) -> float:
    """The largest E p of any layer, p being the share of an expert in its layer's choices: 1 is even, E one expert alone."""
    share_LE = chosen_LE.double() / chosen_LE.sum(-1, keepdim=True)
    return float(share_LE.max()) * chosen_LE.size(-1)


@dataclass(frozen=True, slots=True)
class Routers:
    """How many routers a model has, and of how many experts each chooses how many."""

    num_routers: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """Read them off a model."""
        inner, routers = inner_model(model), routers_of(model)
        if not routers:
            raise refusal(f"transformers names no router of {type(inner).__name__}")
        num_experts = {_size(each, "num_experts") for each in routers}
        top_ks = {_size(each, "top_k", "top_k_experts") for each in routers}
        if 0 in num_experts | top_ks:
            raise unknown_router(routers[0])
        if len(num_experts) > 1 or len(top_ks) > 1:
            words = f"choose {sorted(top_ks)} of {sorted(num_experts)} experts a token"
            raise refusal(f"the routers of {type(inner).__name__} {words}")
        return cls(len(routers), num_experts.pop(), top_ks.pop())


def _size(router: nn.Module, *names: str) -> int:
    places = (router, getattr(router, "config", None))
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def refusal(problem: str) -> InputError:
    """The error for a column that cannot be followed."""
    return InputError(
        "CR0777",
        f"routed_experts cannot be replayed: {problem}.",
        where=_WHERE,
        fix="give, for each row, (tokens, layers, experts a token) over prompt_ids and completion_ids, "
        "-1 where the routing is unknown.",
    )


def unknown_router(router: nn.Module) -> InputError:
    """The error for a router that makes its choice in another way."""
    words = f"{type(router).__name__} does not choose its experts by one top-k over all of them, so its routing cannot be replayed."
    fix = "leave routed_experts out for this model."
    return InputError("CR0757", words, where=_WHERE, fix=fix)


def laid_out(
    routing: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    routers: Routers,
    *,
    pad_to_multiple_of: int | None = None,
) -> torch.Tensor:
    """The rows in the columns of TRL's batch: (B, P + T, L, K), int16.

    A row has P + T places, or P + T - 1: engines do not read the last token that they sampled, and what they give for it,
    if anything, is not looked at. Its layers are those with experts. Prompts are padded on the left, completions on the
    right, with -1.
    ``routing`` has for each row an array, a tensor or nested lists; None for a row of which nothing is known. Ids are those
    before padding.
    """
    if len(routing) != len(completion_ids):
        raise refusal(f"there are {len(routing)} arrays for {len(completion_ids)} completions")
    prompts, completions = [], []
    rows = zip(routing, prompt_ids, completion_ids, strict=True)
    for row, (choices, prompt, completion) in enumerate(rows):
        whole_SLK = _checked(choices, row, len(prompt) + len(completion), routers)
        prompts.append(whole_SLK[: len(prompt)])
        completions.append(whole_SLK[len(prompt) :])
    options: dict[str, Any] = {"padding_value": UNKNOWN, "pad_to_multiple_of": pad_to_multiple_of}
    parts = pad(prompts, padding_side="left", **options), pad(completions, padding_side="right", **options)
    return torch.cat(parts, dim=1)


def _checked(choices: Any, row: int, num_tokens: int, routers: Routers) -> torch.Tensor:
    """One row (num_tokens, L, K), its last token unknown. Each choice is -1 throughout or K different experts."""
    shape = (num_tokens, routers.num_routers, routers.top_k)
    laid_SLK = np.full(shape, UNKNOWN, dtype=np.int16)
    if choices is None:
        return torch.from_numpy(laid_SLK)
    try:
        array = np.asarray(choices.detach().cpu() if isinstance(choices, torch.Tensor) else choices)
    except ValueError:
        raise refusal(f"row {row} is no array: its lists have different lengths") from None
    if array.dtype.kind not in "iu" or array.shape not in (shape, (num_tokens - 1, *shape[1:])):
        raise refusal(f"row {row} is {array.dtype} {array.shape}, and should be whole numbers {shape}")
    array = array[: num_tokens - 1]
    ordered_SLK = np.sort(array, axis=-1)
    is_twice_SL = (ordered_SLK[..., 1:] == ordered_SLK[..., :-1]).any(-1)
    is_outside_SL = (ordered_SLK[..., 0] < 0) | (ordered_SLK[..., -1] >= routers.num_experts)
    is_odd_SL = (array != UNKNOWN).any(-1) & (is_twice_SL | is_outside_SL)
    if is_odd_SL.any():
        token, router = (int(place) for place in np.argwhere(is_odd_SL)[0])
        raise refusal(
            f"row {row} has the experts {array[token, router].tolist()} at token {token}, which are not "
            f"{routers.top_k} different ones of {routers.num_experts}"
        )
    laid_SLK[: num_tokens - 1] = array
    return torch.from_numpy(laid_SLK)


_TOP_K = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)
_CHECKPOINT_FUNCTIONS = {"_gradient_checkpointing_func", "checkpoint_fn"}
"""Where transformers' layers, and torch's ``CheckpointWrapper``, keep the function that runs them again in backward."""


class _Choices(TorchFunctionMode):
    """Inside one forward, each router's top-k over all experts gives the forced ones, and their scores.

    ``num_chosen`` routers have run; ``counts`` has for each how many tokens were forced, and how many changed by that.
    """

    def __init__(self, forced_NLK: torch.Tensor, num_experts: int, num_chosen: int = 0) -> None:
        super().__init__()
        self.forced_NLK, self.num_chosen = forced_NLK, num_chosen
        self.shape = (forced_NLK.size(0), num_experts)
        self.counts: list[torch.Tensor] = []
        self.masked: tuple[Any, Any] = (None, None)

    def again_from(self, num_chosen: int) -> _Choices:
        """For layers that run a second time, in backward: what they count is added to no figure."""
        return _Choices(self.forced_NLK, self.shape[1], num_chosen)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _MASKED_FILL and args:
            # A choice within groups (DeepSeek) blanks the other groups' scores; a forced expert may be one of them.
            self.masked = (result, args[0])
        if func not in _TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        _, num_routers, top_k = self.forced_NLK.shape
        if tuple(scores.shape) != self.shape or k != top_k or self.num_chosen == num_routers:
            return result  # the choice of groups, say
        index_NK = self._chosen(result[1])
        scores = self.masked[1] if scores is self.masked[0] else scores
        return torch.return_types.topk((scores.gather(-1, index_NK), index_NK))

    def _chosen(self, own_NK: torch.Tensor) -> torch.Tensor:
        """Where both choose the same set it stays in the router's own order: not a bit of the sum changes."""
        forced_NK = self.forced_NLK[:, self.num_chosen].to(own_NK)
        is_forced_N1 = forced_NK[:, :1] != UNKNOWN
        differs_N1 = (forced_NK.sort(-1).values != own_NK.sort(-1).values).any(-1, keepdim=True)
        is_changed_N1 = is_forced_N1 & differs_N1
        self.counts.append(torch.stack([is_forced_N1.sum(), is_changed_N1.sum()]))
        self.num_chosen += 1
        return forced_NK.where(is_changed_N1, own_NK)


class Replay:
    """Replays the routing of some rows in the forwards of a model that read these rows, in order.

    ``routing_BWLK`` is as ``laid_out`` gives it, ``mask_BW`` is 1 on tokens. ``num_choices`` are those that matter, a token
    and a router each (the last token's does not, and stays free), ``num_forced`` those of them that were forced, and
    ``num_changed`` those for which the router would have taken another set of experts.
    """

    _under_way: _Choices

    def __init__(self, model: nn.Module, routing_BWLK: torch.Tensor, mask_BW: torch.Tensor) -> None:
        self.model, self.routing_BWLK = model, routing_BWLK
        self.routers = Routers.of(model)
        self.matters_BW = mask_BW.bool() & mask_BW.bool().roll(-1, dims=1)
        self.matters_BW[:, -1] = False
        self.num_choices = self.matters_BW.sum() * self.routers.num_routers
        self.num_forced = self.num_changed = torch.zeros_like(self.num_choices)
        self._num_rows = 0

    @contextmanager
    def in_forwards(self) -> Iterator[None]:
        """Inside, forwards of the model are replayed; so are their layers when backward runs them again."""
        with ExitStack() as stack:
            stack.enter_context(temporarily(self.model, forward=self._replayed(self.model.forward)))
            for number, router in enumerate(routers_of(self.model), start=1):
                stack.callback(router.register_forward_hook(partial(self._check, number)).remove)
            for module in self.model.modules():
                for name in vars(module).keys() & _CHECKPOINT_FUNCTIONS:
                    again = self._remembering(vars(module)[name])
                    stack.enter_context(temporarily(module, **{name: again}))
            yield

    def _replayed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward, over the next rows."""

        def replayed(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            rows = slice(self._num_rows, self._num_rows + ids.size(0))
            self._num_rows = rows.stop
            forced_RWLK = self.routing_BWLK[rows].to(ids.device)
            forced_RWLK = forced_RWLK.masked_fill(~self.matters_BW[rows, :, None, None], UNKNOWN)
            self._under_way = choices = _Choices(forced_RWLK.flatten(0, 1), self.routers.num_experts)
            with choices:
                output = forward(*args, **kwargs)
            choices.masked = (None, None)  # what layers run again keep with it until backward
            counts = [each.to(self.num_choices) for each in choices.counts]
            num_forced, num_changed = torch.stack(counts).sum(0)
            self.num_forced, self.num_changed = self.num_forced + num_forced, self.num_changed + num_changed
            return output

        return replayed

    def _check(self, number: int, router: nn.Module, _inputs: Any, _output: Any) -> None:
        """The router of this number, from 1, has just run: it has made one choice by a top-k, or it makes it otherwise."""
        if self._under_way.num_chosen != number:
            raise unknown_router(router)

    def _remembering(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose second run, long after this context, chooses as the first."""

        def remembering(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            choices = self._under_way
            num_chosen, num_runs = choices.num_chosen, 0

            def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
                nonlocal num_runs
                num_runs += 1
                with nullcontext() if num_runs == 1 else choices.again_from(num_chosen):
                    return function(*inner_args, **inner_kwargs)

            return checkpoint(run, *args, **kwargs)

        return remembering


@contextmanager
def replaying(
    trainer: Any, model: nn.Module, mask_BW: torch.Tensor, routing_BWLK: torch.Tensor | None
) -> Iterator[bool]:
    """Inside, forwards of these rows follow their routing, where ``model`` is the policy, under older weights too.

    Gives whether they do, and logs what that changed, over all processes.
    """
    if routing_BWLK is None or model is trainer.ref_model or not _is_policy(model):
        yield False
        return
    replay = Replay(model, routing_BWLK, mask_BW)
    with replay.in_forwards():
        yield True
    if torch.is_grad_enabled():
        counts = torch.stack([replay.num_choices, replay.num_forced, replay.num_changed])
        choices, forced, changed = trainer.accelerator.reduce(counts, reduction="sum").tolist()
        metrics = trainer._metrics["train"]  # noqa: SLF001 - TRL's only name
        metrics["router/replayed_share"].append(forced / max(choices, 1))
        metrics["router/replay_changed_share"].append(changed / max(forced, 1))


def _is_policy(model: nn.Module) -> bool:
    """Whether an adapter, where there is one, is on and is not TRL's copy of the first one."""
    for module in model.modules():
        is_off = getattr(module, "disable_adapters", None)
        if isinstance(is_off, bool):  # a layer of PEFT's; all are in one state
            return not is_off and "ref" not in module.active_adapters  # type: ignore[operator]
    return True
