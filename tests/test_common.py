"""common.py against definitions: sums over a small vocabulary, and each row of a padded batch computed alone."""
import copy
import gzip
import json
import math
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common
import grpo
from helpers import random_model, save, use_graph_steps

ARCHITECTURES = ["Qwen2", "Llama", "Gemma2", "GPT2", "Mistral", "Cohere", "Granite", "Phi", "GPTNeoX", "Qwen3",
                 "Qwen3_5Text"]
PROMPTS = ["12+34=?", "7+8=?", "1"]  # of three lengths, so that two are left-padded


def batch_of_three(tokenizer):
    return common.collate([tokenizer.encode(text) for text in PROMPTS],
                          [tokenizer.encode(text) + [tokenizer.eos_token_id] for text in ("46", "1+5=6,15", "2")],
                          tokenizer.pad_token_id)


# ----------------------------------------------------------------------------------------------------- log-probs

def logprobs_and_entropy(model, ids, n: int, temperature: float):
    """log π and entropy Σ −p log p at the last n of `ids`, by plain operations on the model's own logits."""
    logp = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[-n - 1:-1]
    return logp.gather(1, ids[-n:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_entropy_are_those_of_each_row_alone(architecture):
    """A row of a padded batch has the values that the model gives for that row without padding."""
    model, tokenizer = random_model(architecture)
    if architecture == "Gemma2":
        model.config.final_logit_softcapping = 2.0  # low, so that a missing soft cap would show
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    T, temperature = mask.shape[1], 0.7
    logprobs, entropy = common.token_logprobs(model, input_ids, attention_mask, T, temperature)
    assert common.head_is_sliceable(model)
    for row in range(3):
        ids, n = input_ids[row][attention_mask[row].bool()], int(mask[row].sum())
        expected = logprobs_and_entropy(model, ids, n, temperature)
        torch.testing.assert_close((logprobs[row, :n], entropy[row, :n]), expected, rtol=1e-4, atol=1e-5)
        assert (logprobs[row, n:] == 0).all() and (entropy[row, n:] == 0).all()


@pytest.mark.parametrize("changes", [{"logit_scale": 0.3}, {"logits_scaling": 3.0}, {}])
def test_a_scaled_or_biased_head_is_exact(changes):
    """Cohere multiplies its logits by a factor, Granite divides them, and Phi's head has a bias."""
    architecture = {"logit_scale": "Cohere", "logits_scaling": "Granite"}.get(next(iter(changes), None), "Phi")
    model, tokenizer = random_model(architecture, **changes)
    if not changes:
        model.lm_head.bias.data.normal_()
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    sliced = common.completion_logprobs(model, input_ids, attention_mask, mask.shape[1], 1.0, True)
    full = common.completion_logprobs(model, input_ids, attention_mask, mask.shape[1], 1.0, False)
    torch.testing.assert_close(sliced, full, rtol=1e-4, atol=1e-5)
    assert common.head_is_sliceable(model.bfloat16())  # although its logits are rounded


def test_a_head_in_bfloat16_takes_hidden_states_in_float32():
    """Mamba's last norm returns float32 whatever the dtype of its weights."""
    model, _ = random_model("Mamba")
    assert common.head_is_sliceable(model.bfloat16())


def test_an_unknown_head_falls_back_to_full_logits_with_one_warning(recwarn):
    """`head_logits` does not know this head, which scales each column: the model's own logits are used instead."""
    model, tokenizer = random_model("Qwen2")
    plain = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            out.logits = out.logits * torch.linspace(1, 2, out.logits.shape[-1])
            return out
    model.__class__ = Odd
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    for _ in range(2):
        logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, mask.shape[1])
    assert sum("all logits at once" in str(w.message) for w in recwarn.list) == 1
    n = int(mask[0].sum())
    expected = model(input_ids[:1]).logits[0].log_softmax(-1)[-mask.shape[1] - 1:-1][:n]
    torch.testing.assert_close(logprobs[0, :n], expected.gather(1, input_ids[0, -mask.shape[1]:][:n, None])[:, 0],
                               rtol=1e-4, atol=1e-5)


def test_hidden_states_of_another_width_than_the_heads():
    model, _ = random_model("Qwen2")
    model.get_output_embeddings = lambda: torch.nn.Linear(16, 5)
    with pytest.warns(UserWarning, match="not a plain head"):
        assert not common.head_is_sliceable(model)


def test_a_head_that_is_off_by_a_little_is_not_sliced():
    model, _ = random_model("Qwen2")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.002)
    with pytest.warns(UserWarning, match="not a plain head"):
        assert not common.head_is_sliceable(model)


def test_a_head_with_a_parameter_that_is_no_bias_is_not_sliced():
    """Read as a bias, the scale of this head would change nothing while it is 0."""
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden * self.log_scale.exp())
    model, _ = random_model("Qwen2")
    model.lm_head = Scaled(*reversed(model.lm_head.weight.shape), bias=False)
    model.lm_head.log_scale = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="not a plain head"):
        assert not common.head_is_sliceable(model)


def test_running_out_of_memory_does_not_make_a_plain_head_look_like_another(monkeypatch):
    """Full logits would take even more."""
    def head_logits(*args):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(common, "head_logits", head_logits)
    model, _ = random_model("Qwen2")
    with pytest.raises(torch.OutOfMemoryError):
        common.head_is_sliceable(model)


def test_dropout_does_not_make_a_plain_head_look_like_another(recwarn):
    model, _ = random_model("GPT2")
    assert common.head_is_sliceable(model.train()) and model.training and not recwarn


def test_full_logits_are_those_of_each_row_alone_where_padding_would_change_them():
    """RecurrentGemma's convolution reads the padding to the left of a prompt, in spite of the attention mask."""
    model, tokenizer = random_model("RecurrentGemma")
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    logprobs, _ = common.completion_logprobs(model, input_ids, attention_mask, mask.shape[1], 1.0, False)
    for row in range(3):
        ids, n = input_ids[row][attention_mask[row].bool()], int(mask[row].sum())
        expected = model(ids[None]).logits[0].log_softmax(-1)[-n - 1:-1].gather(1, ids[-n:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, :n], expected, rtol=1e-4, atol=1e-5)


def test_full_logits_in_bfloat16_give_float32():
    model, _ = random_model("Qwen2")
    model.head_is_sliceable = False
    ids = torch.tensor([[5, 6, 7, 8]])
    logprobs, entropy = common.token_logprobs(model.bfloat16(), ids, torch.ones_like(ids), 2, 0.7)
    logp = (model(ids).logits[0, 1:3].float() / 0.7).log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs[0], logp.gather(1, ids[0, 2:, None])[:, 0])


def test_autocast_around_the_forward_pass_holds_in_the_backward_pass():
    """There the same logits are computed again. So p still adds up to 1, and ∂ log p_y / ∂ bias = 1[v = y] − p to 0."""
    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((50, 16), (50,)))
    hidden, targets = 30 * torch.randn(8, 16), torch.arange(8)
    config = random_model("Qwen2")[0].config
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = common.SlicedLogprobs.apply(config, targets, 1.0, 20, hidden, weight, bias)
    assert logprobs.min() < -100
    logprobs.sum().backward()
    assert abs(bias.grad.sum()) < 0.01


def test_scores_are_float32_also_under_autocast():
    model, tokenizer = random_model("Qwen2")
    model.config.num_labels = 1
    critic = common.AutoModelForSequenceClassification.from_config(model.config).eval()
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        scores = common.sequence_scores(critic, input_ids, attention_mask)
        values = common.token_values(critic, input_ids, attention_mask, mask.shape[1] + 1)
    assert scores.dtype == values.dtype == torch.float32
    assert (scores != scores.bfloat16()).all()


@pytest.mark.parametrize("ban", [-math.inf, torch.finfo(torch.float32).min])  # the latter divided by 0.7 is −∞ too
def test_a_model_that_bans_tokens_has_finite_entropies(ban):
    """As Chameleon bans its image tokens. A banned token adds p log p = 0 to the entropy."""
    model, _ = random_model("Qwen2")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.arange(10), ban))
    ids = torch.tensor([[15, 16, 17, 18]])
    with pytest.warns(UserWarning, match="not a plain head"):
        logprobs, entropy = common.token_logprobs(model, ids, torch.ones_like(ids), 2, 0.7)
    logp = (model(ids).logits[0, 1:3, 10:] / 0.7).log_softmax(-1)
    torch.testing.assert_close(entropy[0], -(logp.exp() * logp).sum(-1))
    torch.testing.assert_close(logprobs[0], logp.gather(1, ids[0, 2:, None] - 10)[:, 0])
    logprobs.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("architecture", ["Qwen2", "Gemma2", "Phi", "Cohere"])  # plain, capped, biased, scaled
def test_slices_of_the_vocabulary_give_the_values_and_gradients_of_plain_operations(architecture, monkeypatch):
    model, tokenizer = random_model(architecture)
    input_ids, attention_mask, mask = batch_of_three(tokenizer)
    coefficients = torch.randn(mask.shape)
    if architecture == "Phi":
        model.lm_head.bias.data.normal_()  # it is initialized with zeros

    def gradient(rows):
        model.zero_grad()
        loss = sum((logprobs * c[:len(logprobs)]).sum() + entropy.square().sum()
                   for (logprobs, entropy), c in zip(rows, coefficients))
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    rows = [(ids[real.bool()], int(m.sum())) for ids, real, m in zip(input_ids, attention_mask, mask)]
    expected = gradient([logprobs_and_entropy(model, ids, n, 0.9) for ids, n in rows])
    widths, head_logits = [], common.head_logits
    monkeypatch.setattr(common, "head_logits", lambda *a: (widths.append(len(a[2])), head_logits(*a))[1])
    common.head_is_sliceable(model)
    for size in (1, 5, len(tokenizer)):  # columns in a slice
        widths.clear()
        monkeypatch.setitem(common.HEAD_SLICE, "cpu", size * int(mask.sum()))
        logprobs, entropy = common.token_logprobs(model, input_ids, attention_mask, mask.shape[1], 0.9)
        torch.testing.assert_close(gradient(zip(logprobs, entropy)), expected, rtol=1e-4, atol=1e-4)
        assert max(widths) == size


@pytest.mark.parametrize("used", [[0], [1], [0, 1]])  # log-probs, as in most losses; the entropy; both
@pytest.mark.parametrize("offset, spread", [(0, 5), (-1000, 5), (0, 1000)])
def test_slices_keep_their_digits_where_logits_are_large(offset, spread, used):
    """Compared with float64. In float32, exp of such logits overflows, and their log Σ exp has few decimals left."""
    hidden, weight = torch.randint(-8, 9, (5, 16)) / 8.0, (torch.randn(97, 16) * spread).round() / 8  # exact in float32
    targets, coefficients = torch.tensor([0, 96, 7, 50, 13]), torch.randn(2, 5)

    def run(dtype, function):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, torch.full((97,), offset))]
        values = function(*inputs)
        sum((values[i] * coefficients[i]).sum() for i in used).backward()
        return [x.detach().double() for x in values] + [x.grad.double() for x in inputs]

    def plain(hidden, weight, bias):
        logp = ((hidden @ weight.T + bias) / 0.5).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    config = random_model("Phi")[0].config
    sliced = run(torch.float32, lambda *inputs: common.SlicedLogprobs.apply(config, targets, 0.5, 10, *inputs))
    torch.testing.assert_close(sliced, run(torch.float64, plain), rtol=1e-5, atol=1e-5)


def test_slices_of_a_single_column(monkeypatch):
    monkeypatch.setitem(common.HEAD_SLICE, "cpu", 1)
    model, _ = random_model("Qwen2")
    ids = torch.tensor([[5, 6, 7]])
    whole = common.token_logprobs(model, ids, torch.ones_like(ids), 2)[0]
    logp = model(ids).logits[0, :2].log_softmax(-1)
    torch.testing.assert_close(whole[0], logp.gather(1, ids[0, 1:, None])[:, 0])


def test_the_log_probs_of_a_rollout_keep_no_graph():
    """It would hold the activations of every micro-batch until the end of the step."""
    model, tokenizer = random_model("Qwen2")
    rollout = common.sample(model, tokenizer, PROMPTS, 1, 4)
    logprobs = common.rollout_logprobs(model, rollout, [[0, 1, 2]], 100, 1.0)
    assert logprobs.any() and not logprobs.requires_grad


# ------------------------------------------------------------------------------------------------- micro-batches

@pytest.mark.parametrize("max_tokens", [1, 30, 64, 10_000])
def test_micro_batches_deal_every_row_once_and_keep_blocks_together(max_tokens):
    model, tokenizer = random_model("Qwen2")
    rollout = common.sample(model, tokenizer, PROMPTS, 4, 12)
    seen = []
    for rows, input_ids, attention_mask, T in common.micro_batches(rollout, [[i, i + 1] for i in range(0, 12, 2)],
                                                                   max_tokens):
        assert rows[::2].tolist() == (rows[1::2] - 1).tolist()
        assert input_ids.numel() <= max_tokens or len(rows) == 2
        assert attention_mask.sum() == rollout.attention_mask[rows].sum()  # only padding was trimmed
        assert T == rollout.lengths[rows].max() and attention_mask[:, 0].any()
        seen += rows.tolist()
    assert sorted(seen) == list(range(12))


def test_long_and_short_rows_do_not_share_a_micro_batch():
    """16 rows 25 wide are 400 tokens, 8·25 + 8·5 = 240 of them real: 40% padding. Allowed up to 1600/4."""
    batch = common.collate([[i] for i in range(16)], [[7] * n for n in [24, 4] * 8], 0)
    dealt = [rows.tolist() for rows, *_ in common.micro_batches(batch, list(range(16)), 500)]
    assert dealt == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert len(list(common.micro_batches(batch, list(range(16)), 1600))) == 1


def test_padding_that_a_pair_has_anyway_ends_no_micro_batch():
    """Eight pairs of a long and a short answer: 40% padding, however they are divided."""
    batch = common.collate([[i] for i in range(16)], [[7] * n for n in [24, 4] * 8], 0)
    assert len(list(common.micro_batches(batch, [[i, i + 1] for i in range(0, 16, 2)], 500))) == 1


@pytest.mark.parametrize("compute", [common.token_logprobs, common.token_values, common.sequence_scores])
def test_equal_rows_are_computed_once(compute):
    """Rows 0, 2 and 3 have the same prompt (5 6) and completion (7 8 9); their masked positions differ.

    Each row gets the values that it would get alone, and the gradients of copies add up. Copies have values that are
    equal to the last bit, so that a group of copies scored by a reward model gets advantages of exactly 0.
    """
    model, _ = random_model("Qwen2")
    common.head_is_sliceable(model)
    if compute is not common.token_logprobs:
        model.config.num_labels = 1
        model = common.AutoModelForSequenceClassification.from_config(model.config).eval()
    input_ids = torch.tensor([[0, 5, 6, 7, 8, 9, 0],
                              [0, 5, 6, 7, 8, 0, 0],
                              [3, 5, 6, 7, 8, 9, 11],
                              [0, 5, 6, 7, 8, 9, 0]])
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0]] * 4)
    attention_mask[1, 5] = 0
    rows_read, coefficients = [], torch.tensor([1.0, 2.0, 3.0, 4.0])
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: rows_read.append(len(inputs[0])))

    def values_and_gradients(parts):
        model.zero_grad()
        T = () if compute is common.sequence_scores else (4,)
        values = [compute(model, input_ids[part], attention_mask[part], *T) for part in parts]
        values = torch.cat([value[0] + value[1] if isinstance(value, tuple) else value for value in values])
        (values.view(4, -1).sum(1) * coefficients).sum().backward()
        return values, [parameter.grad.clone() for parameter in model.parameters()]
    together, gradients = values_and_gradients([slice(0, 4)])
    assert rows_read == [2]
    assert torch.equal(together[0], together[2]) and torch.equal(together[0], together[3])
    alone, expected = values_and_gradients([slice(i, i + 1) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_copies_share_a_micro_batch(monkeypatch):
    """Three copies each of two rows of 25 tokens, shuffled. Copies count once, so 25 tokens have room for all three."""
    batch = common.collate([[5]] * 3 + [[6]] * 3, [[7] * 24] * 6, 0)
    rows = torch.tensor([4, 0, 3, 2, 5, 1])
    dealt = [rows.tolist() for rows, *_ in common.micro_batches(batch, rows, 25)]
    assert dealt == [[0, 1, 2], [3, 4, 5]]
    # A single micro-batch is halved, to have one for each of two ranks. Copies stay together in that too.
    monkeypatch.setattr(common, "world_size", lambda: 2)
    assert [rows.tolist() for rows, *_ in common.micro_batches(batch, rows, 100)] == [[0, 1, 2]]
    monkeypatch.undo()
    # What the mask leaves out, such as what a tool wrote, says nothing: 1 is still a copy of 0, and 2 no longer is.
    batch.input_ids[1, 9], batch.attention_mask[:2, 9] = 8, 0
    assert [rows.tolist() for rows, *_ in common.micro_batches(batch, [0, 1, 2], 25)] == [[2], [0, 1]]


@pytest.mark.parametrize("architecture, can_share", [
    ("Qwen2", True), ("Llama", True), ("GPT2", True), ("Qwen3", True), ("GPTNeo", True), ("Falcon", True),
    ("Cohere", True),
    ("Bloom", False), ("OpenAIGPT", False), ("Mistral", False), ("Gemma2", False)])
def test_a_prefix_is_read_once_for_all_rows_that_share_it(architecture, can_share, monkeypatch):
    """Log-probs, entropies and gradients are those of reading every row in full, as models that cannot share do.

    Of five rows, two have a prompt of three tokens. Three have a prompt of five, and completions that begin with 9 9.
    The first 3 columns hold 2 distinct prefixes: (5 − 2)·3 = 9 tokens saved. The first 5 hold 3: (5 − 3)·5 = 10. The
    first 7 still hold 3: (5 − 3)·7 = 14, the most.
    """
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    model, tokenizer = random_model(architecture)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    completions = [[9, 9, 3, 4, 5, 6, 7], [9, 9, 4, 5, 6], [9, 9, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10], [4, 5, 6]]
    input_ids, attention_mask, mask = common.collate([prompts[i] for i in (1, 1, 1, 0, 0)], completions, 0)
    weights, read, embed = torch.randn(mask.shape) * mask, [], model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: read.append(tuple(inputs[0].shape)))

    def run():
        model.zero_grad()
        logprobs, entropy = common.token_logprobs(model, input_ids, attention_mask, mask.shape[1])
        ((logprobs + entropy) * weights).sum().backward()
        return [logprobs, entropy, *(parameter.grad.clone() for parameter in model.parameters())]
    run()  # only the first call runs `head_is_sliceable`
    read.clear()
    once = run()
    assert read == ([(3, 7), (5, 4)] if can_share else [(5, 11)])
    monkeypatch.setattr(common, "can_share_prefixes", lambda model: False)
    for a, b in zip(once, run()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compute", [common.token_logprobs, common.token_values, common.sequence_scores])
def test_one_gpu_also_reads_a_prefix_once(compute, one_gpu, monkeypatch, tmp_path):
    """There every layer is an FSDP module. Each must gather its weights for both of its backward passes.

    The gradients are those of the same model without FSDP, in float32, up to the rounding of bfloat16.
    """
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    plain, _ = random_model("Qwen2")
    cls = common.AutoModelForCausalLM
    if compute is not common.token_logprobs:
        plain.config.num_labels, cls = 1, common.AutoModelForSequenceClassification
        plain = cls.from_config(plain.config).eval()
    plain.save_pretrained(tmp_path)
    sharded = common.load_model(str(tmp_path), common.setup_device(), cls=cls)
    input_ids, attention_mask, mask = common.collate([[5, 6, 7, 8, 9]] * 6, [[9, i] for i in range(10, 16)], 0)
    assert {parameter.dtype for parameter in sharded.parameters()} == {torch.float32}  # what trains is not rounded
    assert common.can_share_prefixes(sharded) and common.prefix_to_share(input_ids) == 6
    T = () if compute is common.sequence_scores else (mask.shape[1],)
    gradients, read = [], []
    sharded.get_input_embeddings().register_forward_hook(lambda module, inputs, out: read.append(len(inputs[0])))
    for model in (plain, sharded):
        for _ in range(2):  # two micro-batches
            values = compute(model, input_ids, attention_mask, *T)
            (values[0] if isinstance(values, tuple) else values).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert read[-2:] == [1, 6]  # the prefix, and what follows it
    for expected, ours in zip(*gradients):
        assert isinstance(ours, DTensor)
        assert (ours.full_tensor() - expected).norm() < 0.2 * expected.norm() + 1e-3


@pytest.mark.parametrize("architecture, changes", [
    ("Qwen2", {}), ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32))])
def test_the_gradient_is_the_same_each_time_to_the_last_bit(architecture, changes):
    """Gradients are summed in a fixed order. Otherwise a resumed run would not repeat the original.

    Several gradients meet where prompts are read once (here four of 30 tokens, for 128 rows), and where four experts
    read the same token.
    """
    model, _ = random_model(architecture, **changes)
    prompts, completions = torch.randint(3, 20, (4, 30)), torch.randint(3, 20, (128, 4))
    input_ids = torch.cat([prompts[torch.randint(4, (128,))], completions], 1)
    threads, mode, seen = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), set()
    torch.use_deterministic_algorithms(False)
    if architecture == "Qwen3Moe":
        common.setup_device()  # makes PyTorch deterministic; our own functions do not need it
    torch.set_num_threads(2)
    for _ in range(4):
        model.zero_grad()
        common.token_logprobs(model, input_ids, torch.ones_like(input_ids), 4)[0].sum().backward()
        seen.add(tuple(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode, warn_only=True)
    assert len(seen) == 1


def test_sharing_has_to_save_enough(monkeypatch):
    """Eight rows of ten columns share the first n. Reading these once saves 7 n of 80 tokens."""
    def share(n):
        return common.prefix_to_share(torch.tensor([[5] * n + [i] * (10 - n) for i in range(8)]))
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    assert [share(n) for n in (0, 2, 3, 9)] == [0, 0, 3, 9]  # a fifth of 80 is 16: 7·2 = 14 is less, 7·3 = 21 more
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 50)
    assert [share(n) for n in (7, 8)] == [0, 8]  # 49 and 56
    assert common.prefix_to_share(torch.tensor([[5] * 10] * 8)) == 9  # at least one column is left for each row
    assert common.prefix_to_share(torch.tensor([[5]])) == 0
    assert common.prefix_to_share(torch.tensor([[i] + [5] * 99 for i in range(8)])) == 0  # the first columns differ


@pytest.mark.parametrize("ranks, blocks", [(2, 5), (3, 4), (4, 2)])
def test_every_rank_gets_the_same_number_of_micro_batches(ranks, blocks):
    """FSDP waits for all ranks. A rank without a block of its own computes a row with T = 0, which adds nothing."""
    model, tokenizer = random_model("Qwen2")
    rollout = common.sample(model, tokenizer, PROMPTS, 2, 6)
    dealt = []
    for r in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "world_size", lambda: ranks)
            patch.setattr(common, "rank", lambda: r)
            dealt.append(list(common.micro_batches(rollout, list(range(blocks)), 10_000)))
    assert len({len(share) for share in dealt}) == 1
    assert sorted(row for share in dealt for rows, *_, T in share if T for row in rows.tolist()) == list(range(blocks))
    for share in dealt:
        for rows, input_ids, attention_mask, T in share:
            logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
            assert logprobs.shape == (len(rows), T)
            logprobs.sum().backward()  # works for T = 0 too


def test_no_rank_idles_while_there_are_enough_blocks(monkeypatch):
    """One micro-batch of five rows becomes four, of 2, 1, 1 and 1 rows."""
    tokenizer = common.tiny_tokenizer()
    batch = common.collate([[5]] * 5, [[6, i] for i in range(5)], tokenizer.pad_token_id)
    monkeypatch.setattr(common, "world_size", lambda: 4)
    sizes = []
    for rank in range(4):
        monkeypatch.setattr(common, "rank", lambda: rank)
        sizes += [len(rows) * (T > 0) for rows, *_, T in common.micro_batches(batch, list(range(5)), 10_000)]
    assert sorted(sizes) == [1, 1, 1, 2]


def test_the_micro_batch_with_most_rows_is_halved(monkeypatch):
    """A row of 40 tokens and then four of 3: for three ranks, the four are divided. The long row can not be."""
    batch = common.collate([[5]] * 5, [[7] * 39, *([6, i] for i in range(4))], 0)
    monkeypatch.setattr(common, "world_size", lambda: 3)
    dealt = []
    for rank in range(3):
        monkeypatch.setattr(common, "rank", lambda: rank)
        dealt += [rows.tolist() for rows, *_ in common.micro_batches(batch, list(range(5)), 40)]
    assert dealt == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_as_many_of_several_micro_batches(ranks, max_tokens, monkeypatch):
    batch = common.collate([[5]] * 5, [[6, i] for i in range(5)], 0)
    monkeypatch.setattr(common, "world_size", lambda: ranks)
    counts = set()
    for rank in range(ranks):
        monkeypatch.setattr(common, "rank", lambda: rank)
        counts.add(len(list(common.micro_batches(batch, list(range(5)), max_tokens))))
    assert len(counts) == 1


def test_recomputed_activations_share_nothing(monkeypatch):
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    model, _ = random_model("Qwen2")
    ids, mask, completion = common.collate([[5, 6, 7, 8, 9, 10, 11, 12]] * 8, [[7, i] for i in range(8)], 0)
    expected = common.token_logprobs(model, ids, mask, completion.shape[1])[0]
    cfg = SimpleNamespace(freeze_layers=0, gradient_checkpointing=True, lr=1e-4, steps=1, lr_schedule="constant",
                          warmup_steps=0)
    common.make_optimizer(model, cfg)
    read = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: read.append(1))
    logprobs = common.token_logprobs(model, ids, mask, completion.shape[1])[0]
    torch.testing.assert_close(logprobs, expected)
    assert len(read) == 1
    logprobs.sum().backward()
    assert len(read) == 2  # they are recomputed


def test_several_ranks_share_nothing(monkeypatch):
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    model, _ = random_model("Qwen2")
    assert common.can_share_prefixes(model)
    monkeypatch.setattr(common, "world_size", lambda: 2)
    monkeypatch.setattr(common, "read_prefixes_once", None)
    ids, mask, completion = common.collate([[5, 6, 7, 8, 9, 10, 11, 12]] * 8, [[7, i] for i in range(8)], 0)
    common.token_logprobs(model, ids, mask, completion.shape[1])


def test_only_known_attention_shares():
    model, _ = random_model("Qwen2")
    model.config._attn_implementation = "flash_attention_2"
    assert not common.can_share_prefixes(model)


def test_the_head_of_falcon_h1_is_scaled():
    model, _ = random_model("Qwen2")
    hidden, weight = torch.randn(3, 32), torch.randn(26, 32)
    plain = common.head_logits(model.config, hidden, weight)
    model.config.lm_head_multiplier = 0.5
    torch.testing.assert_close(common.head_logits(model.config, hidden, weight), 0.5 * plain)


def test_the_scale_of_the_text_part_counts():
    """As in a model that also sees, whose config holds that of its text part."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(logit_scale=0.25))
    assert common.head_logits(config, torch.ones(1, 2), torch.ones(3, 2)).tolist() == [[0.5] * 3]


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_scaling", "logit_scale", None])
def test_bfloat16_logits_meet_float32_before_anything_else(name):
    """The head rounds its logits to bfloat16, whose values have three digits. All that follows them is float32."""
    torch.manual_seed(0)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**{name or "none": 0.3}))
    hidden, weight, targets = torch.randn(6, 16).bfloat16(), torch.randn(512, 16).bfloat16(), torch.arange(6)
    logits = (hidden @ weight.T).float()
    if name:
        logits = {"final_logit_softcapping": 0.3 * torch.tanh(logits / 0.3), "logits_scaling": logits / 0.3,
                  "logit_scale": logits * 0.3}[name]
    logp = (logits / 0.7).log_softmax(-1)
    logprobs, entropy = common.SlicedLogprobs.apply(config, targets, 0.7, 100, hidden, weight)
    torch.testing.assert_close(logprobs, logp.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(1), rtol=1e-5, atol=1e-5)


def test_gradients_of_slices_add_up_in_float32():
    """The gradient of bfloat16 hidden states is a sum over slices. Summed in bfloat16 it would lose digits."""
    torch.manual_seed(0)
    config = random_model("Qwen2")[0].config
    hidden, weight = torch.randn(4, 16), torch.randn(512, 16)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    targets, grads = torch.tensor([0, 5, 100, 511]), []
    for size in (512, 1):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        common.SlicedLogprobs.apply(config, targets, 1.0, size, *inputs)[0].sum().backward()
        grads.append(inputs[0].grad.float())
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


def test_a_model_in_float64_gets_gradients():
    gradients, ids = [], torch.tensor([[15, 16, 17, 18]])
    for dtype in (torch.float32, torch.float64):
        model = random_model("Qwen2")[0].to(dtype)
        logprobs, entropy = common.token_logprobs(model, ids, torch.ones_like(ids), 2)
        (logprobs + entropy).sum().backward()
        gradients.append([p.grad.float() for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_head_with_a_bias():
    model, _ = random_model("Qwen2")
    model.config.num_labels = 1
    critic = common.AutoModelForSequenceClassification.from_config(model.config)
    critic.score = torch.nn.Linear(32, 1)
    critic.score.bias.data.fill_(3.0)
    ids = torch.tensor([[3, 9, 10, 11]])
    torch.testing.assert_close(common.sequence_scores(critic, ids, torch.ones_like(ids)),
                               critic.score(critic.base_model(ids)[0])[0, -1], rtol=1e-4, atol=1e-5)


def test_the_size_of_a_micro_batch_is_that_of_its_tensors():
    """Rows of 10 + 2 and 2 + 10 tokens. Prompts and completions are padded separately, so the two take 2 · 20."""
    batch = common.collate([[5] * 10, [5] * 2], [[7] * 2, [7] * 10], 0)
    for max_tokens, count in ((39, 2), (40, 1)):
        assert len(list(common.micro_batches(batch, [0, 1], max_tokens))) == count
    # A row of 20 + 20 tokens fills one; then there is room for four of 5 + 5.
    batch = common.collate([[5] * 20, *[[5] * 5] * 4], [[7] * 20, *([i] * 5 for i in range(4))], 0)
    assert [rows.tolist() for rows, *_ in common.micro_batches(batch, list(range(5)), 40)] == [[0], [1, 2, 3, 4]]


# ------------------------------------------------------------------------------------------------------ sampling

@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "Gemma2", "GPT2", "Mistral", "Qwen3", "Gemma4Text", "Lfm2",
                                          "Mamba", "Qwen3_5Text"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6}])
def test_greedy_output_is_that_of_generate(architecture, changes):
    if changes and architecture not in ("Gemma2", "Mistral"):
        pytest.skip("no sliding window")
    model, tokenizer = random_model(architecture, **changes)
    rollout = common.sample(model, tokenizer, PROMPTS, 2, 24, greedy=True)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    T = expected.shape[1] - inputs["input_ids"].shape[1]
    assert rollout.mask.shape[1] == T
    for p in range(3):
        for g in range(2):
            assert rollout.input_ids[2 * p + g].tolist() == expected[p].tolist()


def test_values_may_be_narrower_than_keys():
    """DeepSeek-V3: keys of 16 + 8, values of 8."""
    tokenizer = common.tiny_tokenizer()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id)).eval()
    rollout = common.sample(model, tokenizer, ["12+34=?"], 1, 12, greedy=True)
    expected = model.generate(torch.tensor([tokenizer.encode("12+34=?")]), max_new_tokens=12, do_sample=False)
    n = int(rollout.attention_mask.sum())
    assert rollout.input_ids[0, :n].tolist() == expected[0, :n].tolist()


@pytest.mark.parametrize("head_dim, attention, numbers", [
    (8, "sdpa", 1024 + 480 + 25), (16, "sdpa", 2048 + 480 + 25),
    (8, "eager", 1024 + 480 + 25 * 3 * 4)])  # three copies of the scores of 4 heads
def test_rows_fit_where_they_take_half_of_the_free_memory(head_dim, attention, numbers, monkeypatch):
    """A row with L = 10, T = 6 and G = 4 takes, in numbers of 4 bytes,

    1,024 for keys and values: 2 of them, 2 layers, 2 heads of 8 (of 16: 2,048), 16 tokens;
    480 for the MLP's gate, up and product: 3 · 64 · 10 of the prompt, shared by 4 rows;
    25 for the mask: 10 · 10 of the prompt, shared by 4 rows.

    Each logit takes 12 bytes. A quarter of the machine's memory counts as free, hence 4 · 2 · 100 times a row.
    """
    model, _ = random_model("Qwen2") if head_dim == 8 else random_model("Qwen3", head_dim=head_dim)
    model.config._attn_implementation = attention
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4 * 2 * 100 * (numbers * 4 + 12 * model.config.vocab_size)}
    monkeypatch.setattr(common.os, "sysconf", memory.get)
    assert common.rows_that_fit(model, 10, 6, 4) == 100


def test_temperature_0_is_greedy():
    model, tokenizer = random_model("Qwen2")
    greedy, at_0 = (common.sample(model, tokenizer, PROMPTS, 2, 24, **how)
                    for how in ({"greedy": True}, {"temperature": 0}))
    assert torch.equal(at_0.input_ids, greedy.input_ids) and at_0.mask.sum() > 0


def test_the_first_token_of_all_has_no_logprob():
    model, _ = random_model("Qwen2")
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="no prompt"):
        common.token_logprobs(model, ids, torch.ones_like(ids), 5)
    as_floats, as_numbers = (common.token_logprobs(model, ids, mask, 4)[0]
                             for mask in (torch.ones(2, 5), torch.ones_like(ids)))
    assert torch.equal(as_floats, as_numbers)
    with pytest.raises(ValueError, match="want one shape"):
        common.token_logprobs(model, ids, torch.ones(1, 5), 4)


def test_there_is_no_second_derivative():
    """It would be wrong, since the gradient is computed without a graph of its own."""
    model, _ = random_model("Qwen2")
    ids = torch.ones(1, 5, dtype=torch.long)
    logprobs, _ = common.token_logprobs(model, ids, torch.ones_like(ids), 4)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(logprobs.sum(), [*model.parameters()], create_graph=True, allow_unused=True)


def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same(monkeypatch):
    monkeypatch.setitem(common.HEAD_SLICE, "cpu", 20)  # several slices
    model, _ = random_model("Qwen2", tie_word_embeddings=False)
    ids, gradients, head_logits = torch.arange(3, 13).view(2, 5), [], common.head_logits
    for trains in (True, False):
        model.lm_head.requires_grad_(trains)
        wanted = []
        monkeypatch.setattr(common, "head_logits", lambda config, hidden, weight: (
            wanted.append(weight.requires_grad), head_logits(config, hidden, weight))[1])
        sum(values.sum() for values in common.token_logprobs(model, ids, torch.ones_like(ids), 4)).backward()
        gradients.append([p.grad for p in model.base_model.parameters()])
        assert (model.lm_head.weight.grad is not None) == any(wanted) == trains
        model.zero_grad()
    assert all(map(torch.equal, *gradients))


def test_a_left_padded_row_scores_as_it_does_alone_even_where_its_padding_is_among_the_last_columns():
    model, _ = random_model("Qwen2")
    row = torch.tensor([[7, 8, 9, 10]])
    alone = torch.stack(common.token_logprobs(model, row, torch.ones_like(row), 3))
    for left in (1, 2, 5):  # 5: all four tokens are among the last columns, and nothing predicts the first
        ids, mask = torch.nn.functional.pad(row, (left, 0)), torch.nn.functional.pad(torch.ones_like(row), (left, 0))
        ids, mask = torch.cat([ids, ids.flip(1)]), torch.cat([mask, torch.ones_like(mask)])
        padded = torch.stack(common.token_logprobs(model, ids, mask, left + 3))[:, :1]
        torch.testing.assert_close(padded[:, :, left:], alone)
        assert (padded[:, :, :left] == 0).all()


def test_padding_between_prompt_and_completion_changes_nothing():
    """As where prompts were padded on the right."""
    model, _ = random_model("Qwen2")
    row, ids = torch.tensor([[7, 8, 9, 10, 11]]), torch.tensor([[7, 8, 3, 3, 9, 10, 11], [7, 8, 12, 13, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1] * 7])
    alone = torch.stack(common.token_logprobs(model, row, torch.ones_like(row), 3))
    torch.testing.assert_close(torch.stack(common.token_logprobs(model, ids, mask, 3))[:, :1], alone)


def test_a_model_that_transformers_does_not_know_is_scored_by_its_logits():
    """Each token follows from the one before: a row of a 3 × 3 table of logits."""
    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([[0.0, 0, 0], [0, 2, 0], [1, 0, 5]]))

        def forward(self, input_ids, **kwargs):
            return SimpleNamespace(logits=self.table[input_ids])

    model, ids = Bigram(), torch.tensor([[0, 1, 2]])
    with pytest.warns(UserWarning, match="Bigram"):
        logprobs, _ = common.token_logprobs(model, ids, torch.ones_like(ids), 2)
    # 1 after 0: 1/3. 2 after 1: 1 / (2 + e²).
    torch.testing.assert_close(logprobs, torch.tensor([[-math.log(3), -math.log(2 + math.exp(2))]]))

    class Prompted(Bigram):  # as PEFT's prompt tuning, which puts two tokens of its own in front
        def forward(self, input_ids, **kwargs):
            logits = super().forward(input_ids).logits
            return SimpleNamespace(logits=torch.cat([torch.ones(len(logits), 2, 3), logits], 1))

    with pytest.warns(UserWarning, match="Prompted"):
        assert torch.equal(common.token_logprobs(Prompted(), ids, torch.ones_like(ids), 2)[0], logprobs)


def test_what_is_masked_need_not_be_a_token():
    """Nor may its embedding leak: a weight of 0 in the attention would not stop NaN."""
    model, _ = random_model("Qwen2")
    model.config.num_labels = 1
    critic = common.AutoModelForSequenceClassification.from_config(model.config)
    ids, mask = torch.tensor([[9, 5, 6, 7], [8, 9, 5, 6], [3, 4, 8, 9]]), torch.ones(3, 4, dtype=torch.long)
    mask[0, 0] = mask[2, 3] = 0
    for part in (model, critic):
        part.get_input_embeddings().weight.data[20] = math.nan
    for function, part, *T in ((common.token_logprobs, model, 2), (common.token_values, critic, 2),
                               (common.sequence_scores, critic)):
        expected = function(part, ids, mask, *T)
        for junk in (-100, 10 ** 6, 20):
            got = function(part, ids.where(mask > 0, junk), mask, *T)
            assert all(map(torch.equal, got, expected)) and not torch.stack([*got]).isnan().any()


def test_a_boolean_attention_mask_is_one_too():
    model, tokenizer = random_model("Qwen2")
    ids, mask = torch.tensor([[5, 6, 7, 8], [0, 6, 7, 9]]), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    assert all(map(torch.equal, *(common.token_logprobs(model, ids, m, 2) for m in (mask, mask.bool()))))


def test_the_pad_token_makes_no_difference():
    model, tokenizer = random_model("Qwen2")
    padded = common.sample(model, tokenizer, PROMPTS, 2, 24, greedy=True)
    tokenizer.pad_token = None
    rollout = common.sample(model, tokenizer, PROMPTS, 2, 24, greedy=True)
    assert rollout.completions == padded.completions and torch.equal(rollout.mask, padded.mask)
    assert torch.equal(rollout.attention_mask, padded.attention_mask)


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Mistral", "Gemma2", "Falcon", "Doge"])
def test_the_step_that_cuda_captures_samples_the_same(architecture, monkeypatch):
    """GraphStep, with a RecordedGraph as its CUDA graph. Rows end and leave, the width grows, prompts are padded."""
    model, tokenizer = random_model(architecture)

    def draw(temperature):
        torch.manual_seed(5)
        rollout = common.sample(model, tokenizer, PROMPTS, 8, 90, temperature)
        return rollout.input_ids, rollout.logprobs
    expected = [draw(temperature) for temperature in (0, 1.3)]
    steps = use_graph_steps(monkeypatch)
    for temperature, (ids, logprobs) in zip((0, 1.3), expected):
        drawn = draw(temperature)
        assert torch.equal(drawn[0], ids)
        torch.testing.assert_close(drawn[1], logprobs, rtol=1e-4, atol=1e-5)
    if architecture != "Gemma2":  # its attention is not "sdpa"
        rows, widths = map(set, zip(*steps))
        assert len(rows) > 1 and len(widths) > 1


def test_where_a_step_cannot_be_captured_sampling_goes_on_without(monkeypatch):
    """It is tried once, and said once."""
    model, tokenizer = random_model("Qwen2")
    expected = common.sample(model, tokenizer, PROMPTS, 8, 40, greedy=True)
    use_graph_steps(monkeypatch)
    tried = []

    def capture(step):
        tried.append(step.run())  # what is launched before the error
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(common.GraphStep, "capture", capture)
    monkeypatch.setattr(common, "can_use_graph", lambda model, cache: not hasattr(model, "no_graph"))
    with pytest.warns(UserWarning, match="sampling without a CUDA graph, .*: operation not permitted"):
        rollout = common.sample(model, tokenizer, PROMPTS, 8, 40, greedy=True)
    assert torch.equal(rollout.input_ids, expected.input_ids) and len(tried) == 1


@pytest.mark.parametrize("window, graph", [(20, False), (1000, True)])
def test_a_sliding_window_that_no_row_reaches_hides_nothing(window, graph, monkeypatch):
    """Greedy decoding equals `generate` either way. Only a window that no row reaches allows GraphStep."""
    model, tokenizer = random_model("Mistral", sliding_window=window)
    steps = use_graph_steps(monkeypatch)
    rollout = common.sample(model, tokenizer, PROMPTS[:1], 1, 40, greedy=True)
    expected = model.generate(rollout.input_ids[:, :-rollout.mask.shape[1]], max_new_tokens=40, do_sample=False)
    assert torch.equal(rollout.input_ids, expected) and bool(steps) == graph


@pytest.mark.parametrize("device, ranks, bytes_each, small", [
    ("cuda", 1, 61, True), ("cuda", 1, 59, False), ("cuda", 2, 61, False), ("cpu", 1, 61, False)])
def test_a_model_is_small_if_12_bytes_a_parameter_are_under_a_fifth(device, ranks, bytes_each, small, monkeypatch):
    model = torch.nn.Linear(10, 9)  # 99 parameters; under a fifth: 5·12 = 60 < bytes_each
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 99 * bytes_each))
    monkeypatch.setattr(common, "world_size", lambda: ranks)
    assert common.is_small(model, torch.device(device)) == small


@pytest.mark.parametrize("architecture, fused", [("Qwen2", 5), ("Llama", 5), ("Qwen3", 9), ("Gemma2", 0), ("GPT2", 0)])
def test_only_llamas_rmsnorm_is_fused(architecture, fused):
    """Gemma 2 multiplies by 1 + weight, GPT-2 also subtracts the mean. Values and gradients stay what they are."""
    model, _ = random_model(architecture)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)  # no weight is just 1

    def run():
        model.zero_grad()
        logits = model(input_ids=torch.arange(5, 25).view(2, 10)).logits
        logits.square().mean().backward()
        return [logits, *(parameter.grad.clone() for parameter in model.parameters())]
    plain = run()
    common.fuse_norms(model)
    assert sum("forward" in vars(module) for module in model.modules()) == fused
    for ours, expected in zip(run(), plain):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def by_onednn(work) -> list[str]:
    """The operations of oneDNN that `work()` calls (a convolution may be one, or not), sorted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sorted(event.name.split("::")[-1] for event in profile.events() if "mkldnn::" in event.name
                  or event.name == "aten::mkldnn_convolution")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch comes without oneDNN")
@pytest.mark.parametrize("rows, sizes, trains, onednn", [
    ((3, 100), (512, 512), (0, 1, 2), ["mkldnn_convolution"]),
    ((3, 100), (512, 512), (), ["mkldnn_convolution"]),
    ((2, 100), (512, 512), (0, 1, 2), []),  # under 256 rows, the convolution is slower
    ((2, 100), (512, 512), (2,), []),  # the bias alone trains
    ((2, 1), (512, 512), (), ["_linear_pointwise"]),
    ((1024,), (256, 128), (0, 1, 2), ["mkldnn_convolution"]),  # small weights, but 2^25 multiplications
    ((1023,), (256, 128), (0, 1, 2), []),
    ((256,), (80, 4000), (0, 1, 2), []),  # 20,480 numbers in x
    ((256,), (81, 4000), (0, 1, 2), ["mkldnn_convolution"]),
    ((1023,), (128, 256), (), [])])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_linear_is_the_same_by_onednn(rows, sizes, trains, onednn, bias, contiguous, monkeypatch):
    """Values and gradients are those of float64, up to float32's rounding. (The tests run in a single thread.)"""
    monkeypatch.setattr(common, "mkl_is_slow", lambda: True)  # on any CPU: oneDNN is there, if not faster
    torch.manual_seed(0)
    into, out = sizes
    x = torch.randn(*rows, into) if contiguous else torch.randn(into, *rows).movedim(0, -1)
    arguments = [x, torch.randn(out, into), torch.randn(out) if bias else None]
    weigh = torch.randn(*rows, out)

    def run(function, dtype):
        these = [a if a is None else a.to(dtype).clone().requires_grad_(i in trains) for i, a in enumerate(arguments)]
        y = function(*these)
        if y.requires_grad:
            (y * weigh.to(dtype)).sum().backward()
        return [y.detach(), *(a.grad for a in these if a is not None and a.requires_grad)]
    exact, ours = run(torch.nn.functional.linear, torch.float64), []
    if not bias and trains == (2,):
        onednn = ["_linear_pointwise"]  # nothing trains
    assert by_onednn(lambda: ours.extend(run(common.linear, torch.float32))) == onednn
    for y, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):  # like any Linear layer
        assert common.linear(*arguments).dtype == torch.bfloat16


@pytest.mark.parametrize("capability, cpu, slow", [
    ("AVX512", "AuthenticAMD 26", True), ("AVX512", "AuthenticAMD 25", False), ("AVX512", "GenuineIntel 26", False),
    ("AVX2", "AuthenticAMD 26", False), ("AVX512", "", False)])
def test_mkl_is_slow_on_amd_cpus_since_zen_5(capability, cpu, slow, monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    if cpu:
        vendor, family = cpu.split()
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(common, "Path", lambda path: {"/proc/cpuinfo": file}[path])
    assert common.mkl_is_slow.__wrapped__() == slow


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch comes without oneDNN")
def test_a_models_layers_and_head_compute_by_linear_where_mkl_is_slow(monkeypatch):
    """Then the log-probs and gradients are the same up to rounding. The model can be copied and pickled as before."""
    model, _ = random_model("Qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=1, vocab_size=512)
    for parameter in model.parameters():
        parameter.data *= 0.3
    ids = torch.randint(7, 25, (32, 40))

    def run(model):
        model.zero_grad()
        logprobs, entropy = common.token_logprobs(model, ids, torch.ones_like(ids), 39)
        (logprobs + entropy).sum().backward()
        return [logprobs, entropy, *(parameter.grad for parameter in model.parameters())]
    monkeypatch.setattr(common, "mkl_is_slow", lambda: False)
    plain, ours = run(model), []
    monkeypatch.setattr(common, "mkl_is_slow", lambda: True)
    common.shard(model, torch.device("cpu"))
    # The layer's three large products, the head's (in `SlicedLogprobs`), and the head's again in the backward pass.
    assert by_onednn(lambda: ours.extend(run(model))) == ["mkldnn_convolution"] * 5
    for again in (ours, run(copy.deepcopy(model)), run(pickle.loads(pickle.dumps(model)))):
        for a, b in zip(again, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_gpu_computes_in_bfloat16_and_adds_gradients_in_float32(monkeypatch):
    policies = []
    monkeypatch.setattr(common, "is_small", lambda *_: True)  # a single FSDP module
    monkeypatch.setattr(common, "fully_shard", lambda module, mp_policy, **_: policies.append(mp_policy))
    common.shard(random_model("Qwen2")[0], torch.device("cuda"))
    assert [(policy.param_dtype, policy.reduce_dtype) for policy in policies] == [(torch.bfloat16, torch.float32)]
    assert not policies[0].cast_forward_inputs  # or the rotary angles of distant positions would be rounded


def test_each_layer_is_gathered_by_itself_unless_it_shares_weights(monkeypatch):
    """A weight can be in one FSDP module only: the whole model takes what two layers share, as in Zamba."""
    model, modules = random_model("Qwen2")[0], []
    layers = list(common.decoder_layers(model))
    monkeypatch.setattr(common, "is_small", lambda *_: False)
    monkeypatch.setattr(common, "fully_shard", lambda module, **_: modules.append(module))
    common.shard(model, torch.device("cuda"))
    assert modules == [*layers, model]
    modules.clear()
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    common.shard(model, torch.device("cuda"))
    assert modules == [*layers[2:], model]


def test_a_gathered_model_runs_without_hooks_which_then_come_back():
    model, _ = random_model("Qwen2")
    ids, calls = torch.ones(1, 3, dtype=torch.long), []
    expected = model(ids).logits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for module in (*common.decoder_layers(model), model):
            fully_shard(module)
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        with common.gathered(model):
            assert torch.equal(model(ids).logits, expected) and not calls
        assert all(isinstance(p, DTensor) for p in model.parameters())  # sharded again at once
        assert torch.equal(model(ids).logits, expected) and calls == [1]
        assert all(isinstance(p, DTensor) for p in model.model.layers.parameters())  # sharded again after the forward
    finally:
        dist.destroy_process_group()


def test_sampled_frequencies_are_the_tempered_softmax():
    """Chi-square of 20,000 first tokens against softmax(logits / T): 26 tokens, so 25 degrees of freedom.

    Chance exceeds the bound 60 once in 10,000 seeds, and the seed is fixed. Top-k, top-p, the penalty and the
    temperature of the generation config must have no effect.
    """
    model, tokenizer = random_model("Qwen2")
    model.generation_config.update(do_sample=True, top_k=2, top_p=0.5, repetition_penalty=5.0, temperature=0.1)
    torch.manual_seed(1)
    N, temperature = 20_000, 1.7
    rollout = common.sample(model, tokenizer, ["1+1=?"], N, 1, temperature)
    ids = torch.tensor([tokenizer.encode("1+1=?")])
    expected = (model(ids).logits[0, -1] / temperature).softmax(-1).double() * N
    observed = torch.bincount(rollout.input_ids[:, -1], minlength=len(tokenizer)).double()
    assert (((observed - expected) ** 2 / expected).sum()) < 60


def test_sampled_sequences_have_the_models_probability():
    """Frequencies of (first, second) pairs against the product of the two softmaxes, within 5 standard deviations."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(2)
    N = 20_000
    rollout = common.sample(model, tokenizer, ["1+1=?"], N, 2)
    logprobs, _ = common.token_logprobs(model, rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1])
    first, second = rollout.input_ids[:, -2:].unbind(1)
    pairs = first * 100 + second
    for pair in pairs.unique()[:40]:
        rows = (pairs == pair).nonzero()[:, 0]
        p = logprobs[rows[0]].sum().exp().item()
        assert abs(len(rows) - N * p) < 5 * math.sqrt(N * p) + 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("architecture", ["Qwen2", "GPT2"])
def test_the_samplers_logprobs_are_those_of_its_distribution(architecture, temperature):
    """They agree with those that an update computes. A greedy token has no alternative: its log-prob is 0."""
    model, tokenizer = random_model(architecture)
    rollout = common.sample(model, tokenizer, PROMPTS, 8, 30, temperature)
    expected, _ = common.token_logprobs(model, rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1],
                                        temperature or 1.0)
    torch.testing.assert_close(rollout.logprobs, expected if temperature else 0 * expected, rtol=1e-4, atol=1e-5)


def picked(logits, uniforms) -> torch.Tensor:
    return common.pick_tokens(logits, uniforms, 1.0)[0]


@pytest.mark.parametrize("share", [5e-4, 5e-6])
def test_rare_tokens_keep_their_share(share):
    """100,000 tokens have the share together. A float32 sum near 1 has steps of 6e-8: at 5e-4 it would lose most of
    them, at 5e-6 whole blocks of 512."""
    logits = torch.full((1, 100_001), math.log(share / 100_000))
    logits[0, 0] = math.log(1 - share)
    uniforms = 1 - share * (torch.arange(200, dtype=torch.float64) + 0.5) / 200  # a grid over these tokens
    tokens = picked(logits.expand(200, -1), uniforms)
    assert len(tokens.unique()) == 200
    assert picked(logits, torch.zeros(1, dtype=torch.float64)).item() == 0


def test_uniform_numbers_have_more_digits_than_float32(monkeypatch):
    model, tokenizer = random_model("Qwen2")
    drawn, pick = [], common.pick_tokens
    monkeypatch.setattr(common, "pick_tokens", lambda logits, uniforms, temperature:
                        drawn.append(uniforms) or pick(logits, uniforms, temperature))
    common.sample(model, tokenizer, "1+1=?", 4, 2)
    assert (drawn[0] != drawn[0].float()).all()


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_a_constant_in_all_logits_changes_no_draw(offset):
    logits, uniforms = torch.tensor([[0.0, 1, 2]] * 3) + offset, torch.tensor([0.05, 0.2, 0.9], dtype=torch.float64)
    assert picked(logits, uniforms).tolist() == [0, 1, 2]  # cumulative: .09, .33, 1


def test_a_token_of_one_in_a_billion_can_be_drawn():
    """Two tokens of probability 1 − 2e-9 and e⁻²⁰ = 2e-9: a uniform number above the first one's draws the second."""
    logits = torch.tensor([[0.0, -20.0]] * 2)
    uniforms = torch.tensor([1 - 1e-9, 1 - 4e-9], dtype=torch.float64)
    assert picked(logits, uniforms).tolist() == [1, 0]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for u in (0.0, 0.25, 0.5, 0.75, 1 - 1e-16):
        assert picked(logits, torch.tensor([u], dtype=torch.float64)).item() in (1, 3)


@pytest.mark.parametrize("size", [5, 1000])
def test_a_broken_policy_still_gives_token_ids(size):
    """The NaN loss should end the run, with a message. An index error in sampling would come first and hide it."""
    tokens = picked(torch.full((4, size), math.nan), torch.rand(4, dtype=torch.float64))
    assert ((0 <= tokens) & (tokens < size)).all()


def test_the_rollouts_parts_agree():
    model, tokenizer = random_model("Qwen2")
    rollout = common.sample(model, tokenizer, PROMPTS, 8, 30)
    T = rollout.mask.shape[1]
    ids, lengths = rollout.input_ids[:, -T:], rollout.lengths
    assert lengths.max() == T and (lengths >= 1).all() and rollout.finished.any()
    for row in range(24):
        n = int(lengths[row])
        completion = ids[row, :n].tolist()
        assert tokenizer.eos_token_id not in completion[:-1]
        assert (completion[-1] == tokenizer.eos_token_id) == bool(rollout.finished[row]) or n == 30
        assert rollout.mask[row].tolist() == [True] * n + [False] * (T - n)  # EOS included
        assert rollout.completions[row] == tokenizer.decode(completion, skip_special_tokens=True)
        real = rollout.input_ids[row][rollout.attention_mask[row].bool()].tolist()
        assert real == tokenizer.encode(PROMPTS[row // 8]) + completion
    by_ids = common.sample(model, tokenizer, [tokenizer.encode(p) for p in PROMPTS], 1, 5, greedy=True)
    assert torch.equal(by_ids.input_ids, common.sample(model, tokenizer, PROMPTS, 1, 5, greedy=True).input_ids)
    alone, in_a_list = (common.sample(model, tokenizer, p, 1, 5, greedy=True) for p in (PROMPTS[0], PROMPTS[:1]))
    assert torch.equal(alone.input_ids, in_a_list.input_ids)  # a string is one prompt, not a list of letters


def test_what_is_sampled_does_not_depend_on_how_many_rows_fit(monkeypatch):
    model, tokenizer = random_model("Qwen2")

    def draw(rows_at_a_time):
        monkeypatch.setattr(common, "rows_that_fit", lambda *args: rows_at_a_time)
        torch.manual_seed(3)
        return common.sample(model, tokenizer, PROMPTS, 5, 20).input_ids

    assert torch.equal(draw(1), draw(100)) and torch.equal(draw(4), draw(100))  # 4 cuts through groups of 5


def test_half_of_a_gpus_free_memory(monkeypatch):
    """Free is what the driver has left, and what PyTorch has reserved but does not use. A number takes 2 bytes."""
    free = 2 * 100 * ((1024 + 480 + 25) * 2 + 12 * 26)
    for name, value in (("mem_get_info", (free - 300, 10 * free)), ("memory_reserved", 500), ("memory_allocated", 200)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    model = SimpleNamespace(config=random_model("Qwen2")[0].config, device=torch.device("cuda"))
    assert common.rows_that_fit(model, 10, 6, 4) == 100


@pytest.mark.parametrize("group_size", [1, 3])  # a prompt is read once for its group
def test_a_turn_is_as_wide_as_its_longest_prompt(group_size, monkeypatch):
    """20 tokens are two prompts of 9, so those of 9 and 3 tokens. The three of 2 tokens then fit together."""
    model, tokenizer = random_model("Qwen2")
    monkeypatch.setattr(common, "MOST_PROMPT_TOKENS", 20)
    shapes = []
    model.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    common.sample(model, tokenizer, [[7] * length for length in (2, 9, 2, 3, 2)], group_size, 1)
    assert shapes == [(2, 9), (3, 2)]
    assert common.rows_that_fit(model, 21, 1, group_size) == group_size  # a longer prompt is read alone


def test_several_eos_ids_all_end_a_completion():
    model, tokenizer = random_model("Qwen2")
    other_end = tokenizer.convert_tokens_to_ids("7")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, other_end]
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1+1=?"], 64, 30)
    last = rollout.input_ids[:, -rollout.mask.shape[1]:].gather(1, rollout.lengths[:, None] - 1)[:, 0]
    assert set(last[rollout.finished].tolist()) == {tokenizer.eos_token_id, other_end}
    assert not any("7" in text for text in rollout.completions)  # neither is part of the text


def test_a_prompt_has_a_token_at_least():
    model, tokenizer = random_model("Qwen2")
    for prompts in (["1+1=?", ""], []):
        with pytest.raises(ValueError, match="without tokens"):
            common.sample(model, tokenizer, prompts, 1, 4)
    for group_size, max_new_tokens in ((0, 4), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            common.sample(model, tokenizer, ["1+1=?"], group_size, max_new_tokens)
    for temperature in (-1, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            common.sample(model, tokenizer, ["1+1=?"], 1, 4, temperature=temperature)


def test_a_cache_that_is_called_cache():
    """As in transformers 5.24; before that, it is past_key_values."""
    model, tokenizer = random_model("Qwen2")
    Model, name = type(model), common.cache_argument(model)
    expected = common.sample(model, tokenizer, [[7, 8, 9]], 1, 8, greedy=True)

    class Renamed(Model):
        def forward(self, cache=None, **arguments):
            return Model.forward(self, **{name: cache}, **arguments)
    model.__class__ = Renamed
    assert common.cache_argument(model) == "cache"
    assert torch.equal(common.sample(model, tokenizer, [[7, 8, 9]], 1, 8, greedy=True).input_ids, expected.input_ids)


def test_token_ids_need_of_a_tokenizer_only_its_ends_and_decoding():
    """bench.py passes no more than this of a tokenizer."""
    model, tokenizer = random_model("Qwen2")
    least = SimpleNamespace(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                            decode=tokenizer.decode)
    prompts = [[7, 8, 9], [7, 8, 10]]
    assert torch.equal(*(common.sample(model, t, prompts, 1, 8, greedy=True).input_ids for t in (tokenizer, least)))


def test_what_a_tokenizer_returns_is_no_prompt():
    """Its padding would be read as tokens. (A tensor of prompts that are equally long has none, but may as well be a
    list.)"""
    model, tokenizer = random_model("Qwen2")
    whole = tokenizer(["1+1=?", "12+34=?"])
    padded = tokenizer(["1+1=?", "12+34=?"], padding=True, return_tensors="pt")["input_ids"]
    for prompts in (whole, [whole], [{"role": "user", "content": "1+1=?"}], whole["input_ids"][0], padded, [*padded],
                    padded.numpy(), [], [""], [[]], [[1], ["2"]]):
        with pytest.raises(ValueError, match="want a list of strings, or of unpadded lists"):
            common.sample(model, tokenizer, prompts, 1, 4)


def test_what_cannot_be_sampled_from_is_refused_on_a_rank_without_rows(monkeypatch):
    model, tokenizer = random_model("Qwen2")
    model.config.model_type = "recurrent_gemma"
    monkeypatch.setattr(common, "my_share", lambda total: range(0))
    with pytest.raises(common.UserError, match="cannot be sampled from"):
        common.sample(model, tokenizer, ["1+1=?"], 1, 4)


def test_ranks_cannot_sample_different_prompts(monkeypatch):
    model, tokenizer = random_model("Qwen2")
    monkeypatch.setattr(common, "gather_in_order", lambda mine: [*mine, 0])  # the other rank's prompts
    with pytest.raises(ValueError, match="every rank must pass the same prompts"):
        common.sample(model, tokenizer, ["1+1=?"], 1, 4)


def test_special_tokens_may_be_drawn():
    """Special tokens, such as <unk>, may be drawn. They are tokens of the completion, but not part of its text."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1"] * 64, 1, 20, temperature=3.0)
    tokens = rollout.input_ids[:, -rollout.mask.shape[1]:][rollout.mask]
    assert (tokens == tokenizer.unk_token_id).any()
    assert not any(special in text for special in ("<unk>", "<pad>", "<eos>") for text in rollout.completions)


def test_tags_that_are_special_tokens_are_shown_to_the_reward():
    """As `add_special_tokens` makes them. Otherwise no completion would have an answer."""
    model, tokenizer = random_model("Qwen2")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1"] * 64, 1, 20, temperature=3.0)
    assert any("<answer>" in text for text in rollout.completions)
    assert not any(text.endswith("<eos>") for text in rollout.completions)


def test_padding_is_the_pad_token():
    model, tokenizer = random_model("Qwen2")
    tokenizer.pad_token = "<unk>"
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, PROMPTS, 8, 30)
    padding = rollout.input_ids[rollout.attention_mask == 0]
    assert len(padding) and (padding == tokenizer.pad_token_id).all()


def test_every_end_counts():
    model, tokenizer = random_model("Qwen2")
    eos = tokenizer.eos_token_id
    for configured, expected in ((None, [eos]), (7, sorted([eos, 7])), ([7, 8], sorted([eos, 7, 8]))):
        model.generation_config.eos_token_id = configured
        assert common.eos_ids(model, tokenizer) == expected


def test_finished_at_the_limit():
    """A completion is finished if the last token that --max_new_tokens allows is EOS."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    rollout = common.sample(model, tokenizer, ["1"], 400, 2)
    last = rollout.input_ids.gather(1, (rollout.input_ids.shape[1] - 2 + rollout.lengths - 1)[:, None])[:, 0]
    assert torch.equal(rollout.finished, last == tokenizer.eos_token_id)
    assert (rollout.finished & (rollout.lengths == 2)).any()


@pytest.mark.parametrize("architecture", ["Rwkv", "MiniMax", "RecurrentGemma"])
def test_a_model_without_a_dynamic_cache(architecture):
    """RWKV's forward takes its state under another name, MiniMax's takes a cache of its own class, and RecurrentGemma
    keeps a part of its state in its modules, where the rows of a group would not find it."""
    model, tokenizer = random_model(architecture)
    with pytest.raises(common.UserError, match="its state is no DynamicCache"):
        common.sample(model, tokenizer, PROMPTS, 1, 4)


def test_a_wrapper_or_an_encoder_decoder():
    """DDP has no config. BART would read a prompt with its encoder too."""
    model, tokenizer = random_model("Qwen2")
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64))
    for other in (torch.nn.Sequential(model), bart):
        with pytest.raises(common.UserError, match="cannot be sampled from; of a wrapper .* pass what it wraps"):
            common.sample(other, tokenizer, PROMPTS, 1, 4)


def test_the_default_device_and_dtype_of_a_project_do_not_matter(monkeypatch):
    model, tokenizer = random_model("Qwen2")
    model.config.num_labels = 1
    critic = common.AutoModelForSequenceClassification.from_config(model.config).eval()
    monkeypatch.setitem(common.SHARED_TOKENS, "cpu", 1)
    score = common.load_reward(grpo.Config())
    problems = [common.Problem(prompt, [], "2", {}) for prompt in PROMPTS]

    def run():
        torch.manual_seed(0)
        rollout, meter = common.sample(model, tokenizer, PROMPTS, 4, 8), common.Meter()
        every = [range(len(rollout.mask))]
        logprobs, entropy = common.token_logprobs(model, rollout.input_ids, rollout.attention_mask,
                                                  rollout.mask.shape[1])
        meter.add(2, logprobs=logprobs.mean(), entropy=entropy.mean())
        return [rollout.input_ids, rollout.logprobs, logprobs, common.rollout_logprobs(model, rollout, every, 100, 1.0),
                common.rollout_values(critic, rollout, every, 100), *score(problems, rollout),
                torch.tensor([*meter.means().values()], dtype=torch.float32, device="cpu")]
    expected = run()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, plain in zip(again, expected, strict=True):
        assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_rollouts_of_two_widths_are_joined():
    """Short and long prompts are joined. Padding goes to the left of prompts and to the right of completions."""
    model, tokenizer = random_model("Qwen2")
    torch.manual_seed(0)
    drawn = []
    for prompts, new_tokens in ((["1+1=?", "2"], 9), (["12+34=?"], 3)):
        rollout = common.sample(model, tokenizer, prompts, 2, new_tokens)
        rewards = torch.rand(len(prompts), 2)
        drawn.append((prompts, rollout, rewards, rewards > 0.5))
    problems, joined, rewards, correct = common.join_drawn(drawn, tokenizer.pad_token_id)
    assert problems == ["1+1=?", "2", "12+34=?"] and rewards.shape == correct.shape == (3, 2)
    assert torch.equal(correct, rewards > 0.5)
    alone = [(r, i) for _, r, *_ in drawn for i in range(len(r.mask))]
    T = joined.mask.shape[1]
    for row, (r, i) in enumerate(alone):
        assert torch.equal(joined.input_ids[row][joined.attention_mask[row].bool()],
                           r.input_ids[i][r.attention_mask[i].bool()])
        assert torch.equal(joined.input_ids[row, -T:][joined.mask[row]], r.input_ids[i, -r.mask.shape[1]:][r.mask[i]])
        assert joined.completions[row] == r.completions[i] and joined.finished[row] == r.finished[i]
        assert torch.equal(joined.logprobs[row][joined.mask[row]], r.logprobs[i][r.mask[i]])
        assert joined.attention_mask[row, -T - 1] == 1  # the prompt ends where the completion begins


def test_a_mask_may_have_holes():
    """Tokens that a tool wrote are read, but are not the policy's."""
    def rollout(prompts, completions, holes):
        ids, attention_mask, mask = common.collate(prompts, completions, 0)
        mask[holes] = False
        return common.Rollout(ids, attention_mask, mask, [""] * len(ids), mask[:, 0], mask.float())
    drawn = [rollout([[1, 2, 3], [4]], [[5, 6, 7, 8, 9], [5, 6]], (0, slice(1, 3))), rollout([[1]], [[5]], (0, 0))]
    _, joined, *_ = common.join_drawn([([], each, torch.ones(1, 1), torch.ones(1, 1)) for each in drawn], 0)
    assert joined.mask.int().tolist() == [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    for max_tokens in (1, 99):
        for rows, input_ids, attention_mask, T in common.micro_batches(joined, range(3), max_tokens):
            assert attention_mask.sum() == joined.attention_mask[rows].sum()  # only padding was trimmed
            assert T == joined.attention_mask[rows, 3:].sum(1).max()


def test_each_turn_of_a_row_may_be_padded():
    """5 6 _ 8 _: the 8 is trained on whichever rows it shares a micro-batch with. (7 7 is a prompt of two tokens.)"""
    model, _ = random_model("Qwen2")
    ids, seen = torch.tensor([[0, 3, 5, 6, 0, 8, 0], [7, 7, 5, 6, 8, 9, 9]]), torch.ones(2, 7, dtype=torch.long)
    seen[0, [0, 4, 6]] = 0
    batch = common.Batch(ids, seen, seen[:, 2:].bool())
    values, _ = common.token_logprobs(model, ids, seen, 5)
    for max_tokens, widths in (1, [5, 4]), (99, [5]):
        found = list(common.micro_batches(batch, [0, 1], max_tokens))
        assert [T for *_, T in found] == widths
        for rows, input_ids, attention_mask, T in found:
            logprobs, _ = common.token_logprobs(model, input_ids, attention_mask, T)
            torch.testing.assert_close(logprobs, values[rows, :T])
    plain = model(torch.tensor([[3, 5, 6, 8]])).logits.log_softmax(-1)[0, :3].gather(1, torch.tensor([[5], [6], [8]]))
    torch.testing.assert_close(values[0, [0, 1, 3]], plain[:, 0])


def test_joined_verdicts_are_not_signs_of_rewards():
    """`correct` is the verifier's verdict. The sign of a reward may differ, because of a format bonus or a penalty."""
    ids = torch.ones(2, 3, dtype=torch.long)
    rollout = common.Rollout(ids, ids, ids[:, :1].bool(), ["a", "b"], ids[:, 0].bool(), torch.zeros(2, 1))
    correct = torch.tensor([[True, False]])
    assert torch.equal(common.join_drawn([(["p"], rollout, torch.tensor([[-0.5, 0.5]]), correct)], 0)[3], correct)


def test_attention_of_one_token_has_the_models_scale():
    """Granite scales by attention_multiplier and Gemma 3 by query_pre_attn_scalar, not by 1/sqrt(head_dim)."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)
    mask = torch.arange(6)[None, None, None] < torch.tensor([6, 3, 1])[:, None, None, None]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    for scaling in (None, 0.05):
        torch.testing.assert_close(common.one_token_attention(module, query, key, value, mask, scaling=scaling)[0],
                                   sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)[0])


def test_draws_are_exact():
    """Each draw is the first token whose cumulative probability exceeds the uniform number.

    The expected draws are computed in float64 throughout. `pick_tokens` rounds the sums of blocks to float32, which
    may shift all draws of a block by the same small amount.
    """
    logits = torch.full((1, 3000), math.log(5e-9))
    logits[0, 0], logits[0, 1500] = 0.0, 0.0
    weights = (logits - logits.amax()).exp().double().cumsum(-1)[0]
    for first in (200, 700, 1600):  # in the first likely token's block, between the two, and after both
        wanted = torch.arange(first, first + 100)
        uniforms = (weights[wanted - 1] + weights[wanted]) / 2 / weights[-1]  # the middle of each token's share
        late = picked(logits.expand(len(wanted), -1), uniforms) - wanted
        assert (late == late[0]).all() and abs(late[0]) * 5e-9 < 2.4e-7
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    weights = (logits - logits.amax()).exp().double().cumsum(-1)[0]
    wanted = torch.arange(1, 3000)
    uniforms = (weights[wanted - 1] + weights[wanted]) / 2 / weights[-1]
    assert torch.equal(picked(logits.expand(len(wanted), -1), uniforms), wanted)


def test_logits_in_bfloat16_are_divided_by_the_temperature_in_float32():
    """As for the log-probs. In bfloat16 the quotients would have three digits."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)).bfloat16().expand(1000, -1)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.equal(*(common.pick_tokens(x, uniforms, 0.7)[0] for x in (logits, logits.float())))


def test_the_log_prob_of_a_draw_is_that_among_all_blocks():
    """Tokens 5, 700 and 1400 stand in three blocks of 512, and have probabilities of .5, .3 and .2. Their cumulative
    ones, .5, .8 and 1, say which uniform number draws which. All others have probability 0."""
    logits = torch.full((3, 1600), -math.inf)
    logits[:, [5, 700, 1400]] = torch.tensor([0.5, 0.3, 0.2]).log()
    tokens, logprobs = common.pick_tokens(logits, torch.tensor([0.25, 0.7, 0.9], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [5, 700, 1400]
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 0.3, 0.2]).log())


def test_no_block_without_probability():
    """The first block of 512 tokens has probability 0 throughout, and so do the last tokens."""
    logits = torch.full((1, 1600), -math.inf)
    logits[0, 600:1000] = 0.0
    for u in (0.0, 0.5, 1 - 2 ** -53):
        assert 600 <= picked(logits, torch.tensor([u], dtype=torch.float64)).item() < 1000


def test_no_draw_beyond_the_last_token():
    """A block's sum and its last cumulative sum are rounded differently, so a draw could fall between the two."""
    torch.manual_seed(0)
    logits = torch.randn(4000, 600) * 10
    logits[:, 512:] = -math.inf
    uniforms = torch.full((4000,), 1 - 2 ** -53, dtype=torch.float64)
    assert (picked(logits, uniforms) < 512).all()


def test_one_row_always_fits(monkeypatch):
    model, _ = random_model("Qwen2")
    monkeypatch.setattr(common.os, "sysconf", lambda name: 1)
    assert common.rows_that_fit(model, 10, 6, 4) == 1


# -------------------------------------------------------------------------------------------------------- models

def test_dropout_is_off_and_the_dtype_is_kept(tmp_path):
    """With dropout, the policy that is scored would not be the policy that sampled. GPT-2's rates have other names."""
    model, tokenizer = random_model("GPT2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    policy = common.load_model(str(tmp_path), torch.device("cpu"))
    assert not policy.training and policy.dtype == torch.float32
    assert {module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    arguments = (*batch_of_three(tokenizer)[:2], 8)
    assert torch.equal(common.token_logprobs(policy, *arguments)[0], common.token_logprobs(policy, *arguments)[0])
    common.save_model(policy, tokenizer, tmp_path / "saved")
    assert common.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    assert {weight.dtype for weight in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("architecture, noise", [
    ("Phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.3}),
    ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.3}),
    ("OPT", {"dropout": 0.5, "word_embed_proj_dim": 32})])
def test_a_policy_that_trains_is_the_one_that_sampled(architecture, noise, tmp_path):
    """Noise stays off in layers that recompute activations, which have to be in training mode, also after sampling.

    In that mode PhiMoE would draw its experts at random, Mixtral would add noise, and OPT would apply dropout.
    """
    model, tokenizer = random_model(architecture, **noise)
    model.save_pretrained(tmp_path)
    policy, arguments = common.load_model(str(tmp_path), torch.device("cpu")), (*batch_of_three(tokenizer)[:2], 8)
    cfg = SimpleNamespace(freeze_layers=0, gradient_checkpointing=True, lr=1e-4, steps=1, lr_schedule="constant",
                          warmup_steps=0)
    common.make_optimizer(policy, cfg)
    common.sample(policy, tokenizer, PROMPTS, 2, 4)
    assert common.decoder_layers(policy)[0].training
    torch.testing.assert_close(common.token_logprobs(policy, *arguments)[0],
                               common.token_logprobs(model, *arguments)[0])


def test_no_row_may_pass_the_length_at_which_longrope_changes_the_positions_of_its_whole_batch(tmp_path):
    """Phi-3 and Phi-4-mini have two sets of rotary factors. The longest row of a batch decides which one it gets."""
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model, tokenizer = random_model("Phi3", original_max_position_embeddings=16, rope_scaling=rope)
    save(tmp_path, model, tokenizer)
    cfg = SimpleNamespace(model=str(tmp_path), data="arithmetic", trust_remote_code=False)
    assert common.load_policy(cfg, torch.device("cpu"))[1].model_max_length == 16


def test_a_tokenizer_without_pad_token_gets_eos(tmp_path):
    tokenizer = common.tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert common.load_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id


def test_building_the_tiny_model_changes_nothing_else(monkeypatch):
    """Else a run that builds it would draw other numbers, or take longer, than one that finds it."""
    monkeypatch.setattr(common, "tqdm", lambda steps, **kwargs: [])  # no step of its training
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        common.train_tiny_model(1)
        assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_the_tiny_tokenizer_reads_its_tags_after_saving(tmp_path):
    """AutoTokenizer would take a generic tokenizer beside a Qwen2 config for Qwen2's, which splits text differently."""
    model, tokenizer = random_model("Qwen2")
    save(tmp_path, model, tokenizer)
    text = "<think>2+4=6</think> <answer>46</answer>"
    loaded = common.load_tokenizer(str(tmp_path))
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == text
    from transformers import AutoTokenizer
    text = text.replace(" ", "")
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text)


def test_two_writers_leave_one_whole_directory(tmp_path):
    """With replace=False the first writer wins. A writer that fails leaves the directory as it was."""
    def fill(text):
        return lambda folder: (folder / "file").write_text(text)
    common.write_directory(tmp_path / "a", fill("first"), replace=False)
    common.write_directory(tmp_path / "a", fill("second"), replace=False)
    assert (tmp_path / "a" / "file").read_text() == "first"
    common.write_directory(tmp_path / "a", fill("third"))
    assert (tmp_path / "a" / "file").read_text() == "third"

    def broken(folder):
        fill("half")(folder)
        raise OSError(28, "No space left on device")
    with pytest.raises(common.TrainingFailed, match="No space left"):
        common.write_directory(tmp_path / "a", broken)
    assert (tmp_path / "a" / "file").read_text() == "third" and [p.name for p in tmp_path.iterdir()] == ["a"]


# ---------------------------------------------------------------------------------------------------------- data

def test_arithmetic_splits_share_no_problem_and_do_not_change():
    assert common.arithmetic_rows(2, "train")[0] == {"prompt": "12+41=?", "answer": "53"}
    assert common.arithmetic_rows(2, "eval")[0] == {"prompt": "37+38=?", "answer": "75"}
    for digits in (1, 2, 3):
        train, held_out = (common.arithmetic_rows(digits, split) for split in ("train", "eval"))
        unordered = [{tuple(sorted(row["prompt"][:-2].split("+"))) for row in rows} for rows in (train, held_out)]
        assert not unordered[0] & unordered[1] and unordered[1]
        assert all(eval(row["prompt"][:-2]) == int(row["answer"]) for row in train[:50])
        assert train == common.arithmetic_rows(digits, "train")
        assert digits == 3 or len(unordered[0] | unordered[1]) == (55, 4095)[digits - 1]  # all that there are
    assert len(common.arithmetic_rows(2, "train")) > 7_000
    falling = [a > b for a, b in (row["prompt"][:-2].split("+") for row in common.arithmetic_rows(2, "eval"))]
    assert len(falling) == 200 and 60 < sum(falling) < 140  # in either order, as in training


def test_worked_answers_add_up_and_err_as_told():
    import random
    draw = random.Random(0)
    assert common.worked_answer("12+34=?", draw, 0, 0) == "<think>2+4=6,1+3+0=4</think><answer>46</answer>"
    assert common.worked_answer("57+68=?", draw, 0, 0) == "<think>7+8=15,5+6+1=12</think><answer>125</answer>"
    assert common.worked_answer("57+68=?", draw, 1, 0) == "<think>7+8=15,5+6+0=11</think><answer>115</answer>"
    slipped = common.worked_answer("12+34=?", draw, 0, 1)
    assert slipped.startswith("<think>2+4=6,1+3+0=4</think>") and "<answer>46<" not in slipped


def test_shuffled_visits_every_item_once_a_pass_and_resumes_anywhere():
    items = list(range(10))
    whole = common.Shuffled(items, seed=1)
    drawn = [whole.next(3) for _ in range(10)]
    flat = sum(drawn, [])
    assert sorted(flat[:10]) == sorted(flat[10:20]) == sorted(flat[20:30]) == items and flat[:10] != flat[10:20]
    resumed = common.Shuffled(items, seed=1)
    resumed.position = 12
    assert [resumed.next(3) for _ in range(6)] == drawn[4:]


def test_an_order_of_ones_own_is_made_once_for_each_pass_that_a_step_draws_from():
    class Sorted(common.Shuffled):
        def order(self, epoch):
            made.append(epoch)
            return range(3)
    made, data = [], Sorted(["a", "b", "c"], seed=0)
    assert data.next(4) == ["a", "b", "c", "a"] and sorted(made) == [0, 1]


def test_prompts_and_answers_are_found_under_their_usual_names(tmp_path):
    rows = [{"question": "2+2?", "answer": "It is\n#### 4"}, {"problem": "x", "solution": "so \\boxed{\\frac{1}{2}}"},
            {"prompt": "y", "answer": 7}, {"prompt": [{"role": "user", "content": "hi"}], "answer": "z"},
            {"prompt": "v", "answer": "", "reward_model": {"style": "rule", "ground_truth": "34"}}]  # verl's format
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig") as file:  # with a byte order mark, as some tools write
        file.write("\n\n".join(json.dumps(row) for row in rows))
    assert [problem.answer for problem in common.read_problems(str(path))] == ["4", "\\frac{1}{2}", "7", "z", "34"]
    path.write_bytes(gzip.compress(b'{"prompt": "y", "reward_model": {"ground_truth": {"tests": []}}}'))
    assert common.read_problems(str(path), need_answer=False)[0].answer is None  # left to a reward function
    with pytest.raises(common.UserError, match="no answer .a string or"):
        common.read_problems(str(path))


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), ("", "no rows"), ('{"prompt": "a", "answer": "1"}\n{"prompt": "b', "line 2: want a JSON"),
    ("[1, 2]", "line 1: want a JSON object"), ('{"prompt": "a"}', "line 1: no answer"),
    ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', "line 3: no answer"),  # empty lines count
    ('{"prompt": "a", "answer": ["1"]}', "line 1: no answer"),
    ('{"prompt": 3, "answer": "1"}', "line 1: want a prompt"), ('{"answer": "1"}', "line 1: want a prompt")])
def test_broken_data_is_one_line_that_names_the_place(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(common.UserError, match="rows.jsonl.*" + message):
        common.read_problems(str(path))


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    rows = "".join(json.dumps({"prompt": str(i * i), "answer": "1"}) + "\n" for i in range(999))
    whole = gzip.compress(rows.encode())
    for damaged in (whole[:len(whole) // 2], whole[:300] + b"\xff" * 99 + whole[399:]):
        path.write_bytes(damaged)
        with pytest.raises(common.UserError, match="rows.jsonl.gz"):
            common.read_problems(str(path))


@pytest.mark.parametrize("longest, kept", [(99, [3, 8]), (5, [3])])
def test_prompts_that_are_too_long_are_left_out_aloud(longest, kept, capsys):
    """Too long is more than --max_prompt_tokens, or than the 8 tokens that 4 new ones leave in a context of 12."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.model_max_length = 12
    cfg = SimpleNamespace(model="tiny", system_prompt="", thinking="auto", max_prompt_tokens=longest, max_new_tokens=4)
    problems = [common.Problem("1" * n, [], "1", {}) for n in (3, 8, 9)]
    problems = common.encode_prompts(problems, tokenizer, cfg, "--data")
    assert [len(problem.prompt_ids) for problem in problems] == kept
    assert f"--data: left out {3 - len(kept)} of 3 prompts" in capsys.readouterr().err


def test_prompts_are_rendered_and_encoded():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<eos>{{ m['content'] }}{% endfor %}<eos>"
    text, templated = common.render_prompt("1+1=?", tokenizer, "2")
    assert templated and text == "<eos>2<eos>1+1=?<eos>"
    assert common.render_prompt(text, tokenizer, "2") == (text, False)  # it has the template already
    assert common.render_prompt([{"role": "system", "content": "3"}, {"role": "user", "content": "4"}], tokenizer,
                                "2")[0] == "<eos>3<eos>4<eos>"
    assert common.render_prompt("1+1=?", tokenizer, "none") == ("<eos>1+1=?<eos>", True)
    assert common.render_prompt("1+1=?", tokenizer, "")[0] == f"<eos>{common.SYSTEM_PROMPT}<eos>1+1=?<eos>"
    refusing = ("{{ raise_exception('no ' + messages[0]['role']) if messages[0]['role'] in MANY "
                "else messages[0]['content'] }}")
    # Gemma's template refuses system messages: the prompt is put before the first message.
    tokenizer.chat_template = refusing.replace("MANY", "['system']")
    assert common.render_prompt("1+1=?", tokenizer, "2") == ("2\n\n1+1=?", True)
    tokenizer.chat_template = refusing.replace("MANY", "['system', 'user']")
    with pytest.raises(common.UserError, match="refuses a prompt: no user"):
        common.render_prompt("1+1=?", tokenizer, "2")

    from tokenizers import processors
    with_bos = common.tiny_tokenizer()
    with_bos.bos_token = "<eos>"
    eos = with_bos.eos_token_id
    with_bos._tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", eos)])
    one, = tokenizer.encode("1")
    texts = [("1", False), ("<eos>1", False), ("<eos>1", True), ("1", True), ("1", False)]
    assert common.encode(with_bos, texts) == [[eos, one], [eos, one], [eos, one], [one], [eos, one]]
    with_eos = common.tiny_tokenizer()
    with_eos._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", eos)])
    texts = [("1", False), ("1<eos>", False)]
    assert common.encode(with_eos, texts) == [[one], [one, eos]]  # no EOS is added; one in the text stays
    assert common.encode(tokenizer, texts) == [[one], [one, eos]]
    many = [(str(i), False) for i in range(2500)]  # the tokenizer gets them in 25 calls
    assert common.encode(with_bos, many) == [[eos, *tokenizer.encode(text)] for text, _ in many]


@pytest.mark.parametrize("template, completion, reward", [
    ("{{ messages[-1]['content'] }}", "<think>1</think><answer>2</answer>", 1.5),
    ("{{ messages[-1]['content'] }}<think>", "1</think><answer>2</answer>", 1.5),  # the template begins the completion
    ("{{ messages[-1]['content'] }}<think>", "<think>1</think><answer>2</answer>", 1.0)])
def test_the_format_is_that_of_what_the_template_began(template, completion, reward):
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = template
    cfg = SimpleNamespace(model="tiny", system_prompt="none", thinking="auto", max_prompt_tokens=99, reward="verifier",
                          format_reward=0.5)
    problems = common.encode_prompts([common.Problem("1+1=?", [], "2", {})], tokenizer, cfg, "--data")
    rollout = rollout_of(completion)
    assert common.load_reward(cfg)(problems, rollout)[0].tolist() == [[reward]]


# ------------------------------------------------------------------------------------------ evaluation, machinery

def test_an_evaluation_leaves_the_random_state_as_it_was():
    """So --eval_every and --eval_samples do not change the training."""
    model, tokenizer = random_model("Qwen2")
    problem = common.Problem("1+1=?", tokenizer.encode("1+1=?"), "2", {"answer": "2"})
    score = common.load_reward(SimpleNamespace(reward="verifier", format_reward=0.0))
    cfg = SimpleNamespace(max_new_tokens=8, eval_samples=3, temperature=1.0, reward="verifier", format_reward=0.0)
    state = torch.get_rng_state()
    metrics = common.evaluate(model, tokenizer, [problem] * 2, score, cfg)
    assert metrics.keys() == {"eval_accuracy", "eval_avg@3", "eval_pass@3"}
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mean_of_a_reward_of_ones_own_is_measured_on_held_out_problems():
    """By the verifier it would be the accuracy, which is measured anyway."""
    model, tokenizer = random_model("Qwen2")
    problems = [common.Problem("1+1=?", tokenizer.encode("1+1=?"), "2", {})] * 2
    cfg = SimpleNamespace(max_new_tokens=8, eval_samples=1, temperature=1.0)
    rewards = torch.tensor([[0.25], [-1.0]])
    for cfg.reward, cfg.format_reward in (("mine.py:reward", 0.0), ("verifier", 0.5)):
        metrics = common.evaluate(model, tokenizer, problems, lambda problems, rollout: (rewards, rewards > 0), cfg)
        assert metrics == {"eval_accuracy": 0.5, "eval_reward": -0.375}


def test_meter_weights_its_means():
    meter = common.Meter()
    meter.add(3, entropy=1.0)
    meter.add(torch.tensor(1), entropy=torch.tensor(5.0))
    meter.add(0, entropy=100.0)
    assert meter.means() == {"entropy": 2.0}


def test_meter_adds_in_float32_and_keeps_no_graph():
    """In bfloat16, a sum of .5 stops at 128: its next value is 129."""
    meter, value = common.Meter(), torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(1000):
        meter.add(1, loss=value)
    assert meter.means() == {"loss": 0.5} and not meter.sums["loss"][0].requires_grad


def test_masked_mean_ignores_what_is_masked():
    assert common.masked_mean(torch.tensor([1.0, 3.0, math.nan]), torch.tensor([True, True, False])) == 2.0
    assert common.masked_mean(torch.tensor([math.nan]), torch.tensor([False])) == 0.0


def test_a_share_of_the_layers_is_rounded_down():
    """0.9 of two layers is one."""
    model, _ = random_model("Qwen2")
    common.make_optimizer(model, grpo.Config(freeze_layers=0.9))
    frozen = [not any(p.requires_grad for p in layer.parameters()) for layer in model.model.layers]
    assert frozen == [True, False]


def test_a_schedule_counts_updates_and_not_steps():
    """Two steps with two minibatches, each read twice, make eight updates. Over these the rate falls to 0."""
    model, _ = random_model("Qwen2")
    cfg = grpo.Config(steps=2, minibatches=2, updates_per_batch=2, lr=8.0, lr_schedule="linear")
    optimizer, schedule = common.make_optimizer(model, cfg)
    rates = []
    for _ in range(9):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([8, 7, 6, 5, 4, 3, 2, 1, 0])


def test_weights_do_not_decay():
    """With a gradient of 0, AdamW leaves a weight as it is."""
    model, _ = random_model("Qwen2")
    optimizer, _ = common.make_optimizer(model, grpo.Config(lr=0.1))
    before = model.lm_head.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.lm_head.weight, before)


def rollout_of(*texts):
    N = len(texts)
    return common.Rollout(None, None, torch.ones(N, 1, dtype=torch.bool), list(texts), torch.ones(N, dtype=torch.bool))


def reward_function(tmp_path, body, name="reward.py"):
    (tmp_path / name).write_text(body)
    return f"{tmp_path / name}:f"


def test_a_reward_of_0_is_wrong(tmp_path):
    spec = reward_function(tmp_path, "def f(prompt, completion, row): return float(completion)\n")
    score = common.load_reward(SimpleNamespace(reward=spec, format_reward=0.5))
    problems = [common.Problem("1+1=?", [], "2", {})]
    rewards, correct = score(problems, rollout_of("-1", "0", "0.5", "1"))
    assert rewards.tolist() == [[-1, 0, 0.5, 1]] and correct.tolist() == [[False, False, True, True]]


def test_the_reward_is_for_a_closed_answer():
    """A completion that ends in <answer>12 may have meant 125, so it gets no reward.

    `extract_answer` itself accepts it, for other samplers, which may stop at </answer> and leave the tag out.
    """
    score = common.load_reward(SimpleNamespace(reward="verifier", format_reward=0))
    rewards, _ = score([common.Problem("5+7=?", [], "12", {})], rollout_of("<answer>12", "<answer>12</answer>"))
    assert rewards.tolist() == [[0, 1]] and common.extract_answer("<answer>12") == "12"


def test_the_question_earns_no_reward():
    score = common.load_reward(SimpleNamespace(reward="verifier", format_reward=0), wrong=-1.0)
    rewards, correct = score([common.Problem("5+7=?", [], "12", {})],
                             rollout_of("<answer>5+7</answer>", "<answer>7+5</answer>", "<answer>5+7=12</answer>"))
    assert rewards.tolist() == [[-1, -1, 1]] and correct.tolist() == [[False, False, True]]


def test_what_a_reward_function_is_given(tmp_path):
    spec = reward_function(tmp_path, "def f(prompt, completion, row):\n"
                           "    return (prompt, completion, row['id']) == ('p', 'c', 7)\n")
    judge = common.load_reward_function(spec)
    reward = judge(common.Problem("p", [], "2", {"id": 7}), "c")
    assert reward == (1.0, True) and isinstance(reward[0], float)


@pytest.mark.parametrize("returned", ["(1.0, 0.5)", "(True, 1)", "(1.0, True, 2)", "(float('nan'), True)"])
def test_a_pair_is_a_number_and_a_bool(returned, tmp_path):
    spec = reward_function(tmp_path, f"def f(prompt, completion, row): return {returned}\n")
    judge = common.load_reward_function(spec)
    with pytest.raises(common.UserError, match="or a pair of it and a bool"):
        judge(common.Problem("p", [], "2", {}), "c")


def test_a_reward_function_may_import_its_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_neighbour_module.py").write_text("VALUE = 3.0\n")
    spec = reward_function(tmp_path, "def f(prompt, completion, row):\n"
                           "    import my_neighbour_module\n    return my_neighbour_module.VALUE\n")
    assert common.load_reward_function(spec)(common.Problem("p", [], "2", {}), "c") == (3.0, True)
    assert sys.path[-1] == str(tmp_path.resolve())  # last: a neighbour hides no package


def test_a_colon_in_the_path_of_a_reward_function(tmp_path):
    (tmp_path / "a:b").mkdir()
    assert common.load_reward_function(reward_function(tmp_path / "a:b", "def f(prompt, completion, row): return 1\n"))


def test_a_reward_model_reads_the_prompt_in_its_own_template():
    """The prompt is that of the row if it is messages, else the problem's; with the run's system prompt and a single
    BOS (here <unk>)."""
    from tokenizers import processors
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", tokenizer.unk_token_id)])
    problem = common.Problem("as the policy has it", [], None, {"prompt": [{"role": "user", "content": "1"}]})
    rollout = common.Rollout(None, None, torch.ones(2, 1), ["2", "3"], torch.tensor([True, False]))
    batch = common.retokenize([problem] * 2, rollout, tokenizer, "0")
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch.input_ids, batch.attention_mask)]
    assert texts == ["0=1=2<eos>", "0=1=3<eos>"]  # though the second was cut
    batch = common.retokenize([common.Problem("4", [], None, {"number": 4})] * 2, rollout, tokenizer, "0")
    assert tokenizer.decode(batch.input_ids[0]) == "0=4=2<eos>"  # a problem of the user's own making
    problem.opening = "<think>"  # in the policy's prompt; the reward model's has none
    batch = common.retokenize([problem] * 2, rollout, tokenizer, "0")
    assert tokenizer.decode(batch.input_ids[0]) == "0=1=<think><unk>2<eos>"  # <unk>: a newline
    problem.opening = ""
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"  # as R1's, which a given answer lacks
    batch = common.retokenize([problem] * 2, rollout, tokenizer, "0")
    assert tokenizer.decode(batch.input_ids[0]) == "0=1=2<eos>"


def test_a_reward_model_reads_an_answer_as_its_template_writes_one():
    """Between a lead, as Qwen3's empty thought, and the token that ends a turn, here <unk>, even if it was cut."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}={% endfor %}"
                               "{% if not add_generation_prompt %}-{{ messages[-1]['content'] }}<unk>{% endif %}")
    problem = common.Problem("1", [], None, {"prompt": "1"})
    rollout = common.Rollout(None, None, torch.ones(2, 1), ["2", "3"], torch.tensor([True, False]))
    batch = common.retokenize([problem] * 2, rollout, tokenizer, "none")
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch.input_ids, batch.attention_mask)]
    assert texts == ["1=-2<unk>", "1=-3<unk>"]


def test_accuracy_avg_and_pass(monkeypatch):
    calls = []
    def sample(policy, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, greedy=False):
        calls.append((group_size, max_new_tokens, temperature, greedy))
        return group_size
    monkeypatch.setattr(common, "sample", sample)
    def score(problems, k):
        return None, torch.tensor([[True], [False]]) if k == 1 else torch.tensor([[True, False], [False, False]])
    cfg = SimpleNamespace(max_new_tokens=8, eval_samples=2, temperature=0.6, reward="verifier", format_reward=0.0)
    problems = [common.Problem("1", [5], "1", {})] * 2
    metrics = common.evaluate(None, None, problems, score, cfg)
    assert metrics == {"eval_accuracy": 0.5, "eval_avg@2": 0.25, "eval_pass@2": 0.5}
    assert [call[0] for call in calls] == [1, 2] and calls[0][3] and calls[1] == (2, 8, 0.6, False)
    assert common.evaluate(None, None, [], score, cfg) == {}
    cfg.eval_samples = 1
    assert common.evaluate(None, None, problems, score, cfg) == {"eval_accuracy": 0.5} and len(calls) == 3


def test_a_step_without_signal_is_named(capsys):
    common.warn_without_signal(3, teaches=torch.tensor(True))
    assert not capsys.readouterr().err
    common.warn_without_signal(3, teaches=False)
    assert "step 3" in capsys.readouterr().err


def test_a_mean_over_nothing_is_no_number():
    """A 0 would look like a value: an entropy of 0, for example, like a policy that has collapsed."""
    meter = common.Meter()
    meter.add(0, kl=3.0)
    meter.add(2, entropy=1.0)
    meter.add(1, entropy=4.0)
    means = meter.means()
    assert math.isnan(means["kl"]) and means["entropy"] == 2.0
