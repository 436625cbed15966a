"""DPO: its loss and gradient on hand-worked numbers, whole runs, and every format of preference data."""
import itertools
import json
import math
import random
import types

import pytest
import torch

import common
import dpo
from helpers import (ROOT, assert_metrics, assert_same_gradient, assert_same_weights, begin_with, beside, distributions,
                     ended_well, fork, is_right, load_tiny_model, plain_finished, plain_logprobs, plain_update,
                     random_model, read_metrics, record_run, run_script, save)


def test_the_loss_is_ln_2_at_the_start_and_by_hand():
    """h = β((−1 + 3) − (−2 + 2.5)) = .1·1.5 = .15; −log σ(.15) = .62096. Where policy and reference agree, ln 2."""
    losses, stats = dpo.dpo_loss(*(torch.tensor([x]) for x in (-1.0, -3.0, -2.0, -2.5)), beta=0.1)
    assert losses.item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.15))), rel=1e-5)
    assert stats["margin"].item() == pytest.approx(0.15)
    assert stats["chosen_reward"].item() == pytest.approx(0.1)
    assert stats["rejected_reward"].item() == pytest.approx(-0.05)
    assert stats["weight"].item() == pytest.approx(1 / (1 + math.exp(0.15)))
    same = torch.tensor([-1.0, -5.0])
    assert dpo.dpo_loss(same, same - 2, same, same - 2, 0.3)[0].tolist() == pytest.approx([math.log(2)] * 2)


def test_the_gradient_is_the_papers():
    """−β(1 − σ(h))(∇log π⁺ − ∇log π⁻), and none for the reference."""
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 5).requires_grad_().unbind(0)
    chosen.retain_grad(), rejected.retain_grad()
    references = torch.randn(2, 5, requires_grad=True)
    losses, _ = dpo.dpo_loss(chosen, rejected, *references, beta=0.7)
    losses.sum().backward()
    h = 0.7 * (chosen - rejected - references[0] + references[1]).detach()
    torch.testing.assert_close(chosen.grad, -0.7 * (1 - h.sigmoid()))
    torch.testing.assert_close(rejected.grad, 0.7 * (1 - h.sigmoid()))
    assert references.grad is None


def test_the_optimum_is_the_papers():
    """Section 4: if P(y_i ≻ y_j) = σ(r_i − r_j) (Bradley–Terry), the loss is least where π ∝ π_ref·exp(r/β).

    A policy over five answers, trained on all twenty ordered pairs, each as often as it is preferred.
    """
    torch.manual_seed(0)
    rewards, reference = torch.randn(5), torch.randn(5).log_softmax(0)
    chosen, rejected = torch.tensor(list(itertools.permutations(range(5), 2))).unbind(1)
    shares = (rewards[chosen] - rewards[rejected]).sigmoid() / 10
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100, line_search_fn="strong_wolfe")

    def expected_loss():
        optimizer.zero_grad()
        policy = logits.log_softmax(0)
        losses, _ = dpo.dpo_loss(policy[chosen], policy[rejected], reference[chosen], reference[rejected], beta=0.5)
        loss = (shares * losses).sum()
        loss.backward()
        return loss

    optimizer.step(expected_loss)
    torch.testing.assert_close(logits.softmax(0), (reference + rewards / 0.5).softmax(0), rtol=1e-3, atol=1e-4)


def test_label_smoothing_and_reference_free():
    """s = .1 and, without a reference, h = 4 − 2: .9·log(1 + e⁻²) + .1·log(1 + e²)."""
    losses, stats = dpo.dpo_loss(torch.tensor([4.0]), torch.tensor([2.0]), None, None, beta=1.0, label_smoothing=0.1)
    assert (stats["chosen_reward"], stats["rejected_reward"]) == (4, 2)
    assert losses.item() == pytest.approx(0.9 * math.log(1 + math.exp(-2)) + 0.1 * math.log(1 + math.exp(2)), rel=1e-5)


@pytest.mark.parametrize("difference, loss, slope", [(-5000.0, 5000.0, -1.0), (5000.0, 0.0, 0.0)])
def test_huge_margins_are_exact(difference, loss, slope):
    """β = 1, so h is the difference. However wrong a pair is, its loss is −h and its slope −β (1 − σ(h)) = −1: no clamp
    keeps it from being learned."""
    chosen = torch.tensor([difference], requires_grad=True)
    losses, _ = dpo.dpo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=1.0)
    losses.sum().backward()
    assert (losses.item(), chosen.grad.item()) == (loss, slope)


def test_metrics_keep_no_graph():
    assert not common.masked_mean(torch.ones(2, requires_grad=True), torch.ones(2).bool()).requires_grad
    ones = torch.ones(2, requires_grad=True)
    assert not any(value.requires_grad for value in dpo.dpo_loss(ones, ones, ones, ones, 0.1)[1].values())


@pytest.mark.parametrize("max_tokens", [1, 60, 100_000])
def test_any_micro_batch_size_gives_the_same_gradient(max_tokens):
    """Compared with the definition: each answer of each pair on its own."""
    model, tokenizer = random_model("Qwen2")
    cfg = dpo.Config(micro_batch_tokens=max_tokens)
    texts = [("1+1=?", "2", "31"), ("12+34=?", "46,46", "4"), ("7", "7", "1,2,3,4")]
    pairs = [common.Preference(prompt, [], [better, worse], [], [1.0, 0.0]) for prompt, better, worse in texts]
    pairs = common.encode_preferences(pairs, tokenizer, cfg, "--data")
    batch, blocks = common.collate_preferences(pairs, tokenizer.pad_token_id, "cpu")
    references = torch.randn(6)

    def in_micro_batches():
        for rows, input_ids, attention_mask, T in common.micro_batches(batch, blocks, max_tokens):
            logprobs = common.token_logprobs(model, input_ids, attention_mask, T, 1.0)[0].sum(dim=1)
            losses, _ = dpo.dpo_loss(logprobs[::2], logprobs[1::2], references[rows[::2]], references[rows[1::2]], 0.1)
            (losses.sum() / 3).backward()

    def by_definition():
        for i, pair in enumerate(pairs):
            chosen, rejected = (
                distributions(model, torch.tensor(pair.prompt_ids + ids), len(ids)).log_prob(torch.tensor(ids)).sum()
                for ids in pair.answer_ids)
            h = 0.1 * (chosen - references[2 * i] - rejected + references[2 * i + 1])
            (-torch.nn.functional.logsigmoid(h) / 3).backward()  # eq. 7

    assert_same_gradient([model], in_micro_batches, by_definition)


@pytest.mark.parametrize("reference_free", [False, True])
def test_every_update_is_that_of_the_plain_algorithm(reference_free, tmp_path, monkeypatch):
    """Pairs from a file, one answer at a time: six of the eight per step, so that step 2 begins a second epoch.

    The held-out pairs are the other way round, so they cannot be mistaken for those that are trained on.
    """
    monkeypatch.setattr(common, "load_reference", None)  # no second model
    draw, path, held_out = random.Random(0), tmp_path / "pairs.jsonl", tmp_path / "held_out.jsonl"
    rows = [{"prompt": row["prompt"], "chosen": common.worked_answer(row["prompt"], draw, 0, 0),
             "rejected": common.worked_answer(row["prompt"], draw, 0, 1), "margin": 2}  # whose size is ignored
            for row in common.arithmetic_rows(2, "train")[:8]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:5]]
    others.append({**rows[5], "chosen": "1"})  # training makes the rejected answer rarer, but "1" is rarer still
    held_out.write_text("".join(json.dumps(row) + "\n" for row in others))
    steps = record_run(
        monkeypatch, "dpo.py", tmp_path / "run", "--data", path, "--eval_data", held_out, "--steps", 3,
        "--pairs_per_step", 6, "--beta", 0.3, "--label_smoothing", 0.1, "--temperature", 0.8, "--lr", 1e-4,
        "--warmup_steps", 0, "--max_grad_norm", 0.5, "--micro_batch_tokens", 200,
        *["--reference_free"] * reference_free)
    policy, reference, tokenizer = load_tiny_model(), load_tiny_model(), common.tiny_tokenizer()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)

    def logprob(model, prompt, answer):
        """log π(y|x): the sum over the answer's tokens, EOS included, at the run's temperature."""
        prompt_ids, answer_ids = tokenizer.encode(prompt), tokenizer.encode(answer + "<eos>")
        next_token = distributions(model, torch.tensor(prompt_ids + answer_ids), len(answer_ids), 0.8)
        return next_token.log_prob(torch.tensor(answer_ids)).sum()

    def rewards(pair):
        """β·log π/π_ref of the chosen and of the rejected answer."""
        def log_ratio(answer):
            of_policy = logprob(policy, pair.prompt, answer)
            return of_policy if reference_free else of_policy - logprob(reference, pair.prompt, answer).detach()
        return torch.stack([0.3 * log_ratio(answer) for answer in pair.answers])

    def margin(pair):
        """The argument of σ in eq. 7."""
        chosen, rejected = rewards(pair)
        return chosen - rejected

    for step in steps:
        begin_with(step, 0, (policy, optimizer))
        [pairs] = step.batches
        margins = torch.stack([margin(pair) for pair in pairs])
        losses = -0.9 * margins.sigmoid().log() - 0.1 * (-margins).sigmoid().log()  # cDPO, s = .1
        updates = [plain_update(optimizer, losses.mean(), 1e-4, 0.5)]
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        margins = margins.detach()
        weight = (-margins).sigmoid().mean() - 0.1  # −∂loss/∂h = σ(−h) − s
        assert_metrics(step, updates, {"margin": margins.mean(), "weight": weight})
    assert_same_weights(tmp_path / "run", policy)
    # Only the last step's: in the first, margins to the reference are 0 up to rounding, with random signs.
    assert step.metrics["pair_accuracy"] == (margins > 0).float().mean()
    if not reference_free:  # before the first step, policy and reference are equal, so all pairs tie
        assert read_metrics(tmp_path / "run")[0]["eval_pair_accuracy"] == 0.5
    chosen, rejected = torch.stack(list(map(rewards, common.read_preferences(str(held_out))))).detach().unbind(1)
    margins = chosen - rejected
    assert_metrics(step, updates, {"eval_pair_accuracy": (margins > 0).float().mean(), "eval_margin": margins.mean(),
                                   "eval_chosen_reward": chosen.mean(), "eval_rejected_reward": rejected.mean(),
                                   "eval_loss": -margins.sigmoid().log().mean()})  # without smoothing
    assert (margins[-1] > 0) == (not reference_free)


@pytest.mark.parametrize("reference_free", [False, True])
def test_every_update_on_policy_is_that_of_the_plain_algorithm(reference_free, tmp_path, monkeypatch):
    """Two samples for each of twelve prompts: a right and a wrong one make a pair; two right or two wrong ones tie."""
    if reference_free:
        monkeypatch.setattr(common, "load_reference", None)  # loading a reference would be an error
    steps = record_run(
        monkeypatch, "dpo.py", tmp_path / "run", "--on_policy", "--steps", 3, "--pairs_per_step", 12, "--beta", 0.3,
        "--temperature", 0.8, "--lr", 1e-4, "--warmup_steps", 0, "--max_grad_norm", 0.5, "--micro_batch_tokens", 200,
        *["--reference_free"] * reference_free)
    policy, reference = load_tiny_model(), load_tiny_model()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in steps:
        begin_with(step, 0, (policy, optimizer))
        [rollout] = step.rollouts
        right = [is_right(rollout, i) for i in range(24)]
        pairs = [(i, i + 1) if right[i] else (i + 1, i) for i in range(0, 24, 2) if right[i] != right[i + 1]]
        losses = []
        for chosen, rejected in pairs:
            log_ratios = {i: plain_logprobs(policy, rollout, i, 0.8).sum() for i in (chosen, rejected)}  # log π(y|x)
            if not reference_free:  # − log π_ref(y|x)
                for i in log_ratios:
                    log_ratios[i] = log_ratios[i] - plain_logprobs(reference, rollout, i, 0.8).sum().detach()
            losses.append(-(0.3 * (log_ratios[chosen] - log_ratios[rejected])).sigmoid().log())  # eq. 7
        updates = [plain_update(optimizer, sum(losses) / len(losses), 1e-4, 0.5)]
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        assert_metrics(step, updates, {"reward": sum(right) / 24, "accuracy": sum(right) / 24, "ties": 12 - len(pairs),
                                       "sampled_tokens": rollout.lengths.sum(),
                                       "completion_length": rollout.lengths.float().mean(),
                                       "truncated_fraction": (~plain_finished(rollout)).float().mean()})
    assert_same_weights(tmp_path / "run", policy)


@pytest.mark.parametrize("flags, system", [([], ""), (["--on_policy"], common.SYSTEM_PROMPT)])
def test_the_evaluation_asks_as_the_training_data_does(flags, system, tmp_path, monkeypatch):
    """Problems to sample for get a default system prompt, pairs from a file do not; the evaluation follows suit."""
    model, tokenizer = random_model("Qwen2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save(tmp_path / "base", model, tokenizer)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=?", "answer": "2", "chosen": "2", "rejected": "3"}))
    asked, evaluate = [], common.evaluate

    def recorded(policy, tokenizer, problems, *rest):
        asked.extend(problem.prompt_ids for problem in problems)
        return evaluate(policy, tokenizer, problems, *rest)

    monkeypatch.setattr(common, "evaluate", recorded)
    errors = run_script("dpo.py", "--model", tmp_path / "base", "--data", path, "--eval_problems", path, "--steps", 1,
                        "--max_new_tokens", 4, "--output_dir", tmp_path / "run", *flags)
    assert f"--lr {dpo.Config.lr}: these values suit the tiny model" in errors
    assert asked and all(ids == tokenizer.encode(system + "1+1=?") for ids in asked)


# ------------------------------------------------------------------------------------------------- preference data

def test_dialogues_are_split_at_the_last_shared_assistant_turn():
    """As in HH-RLHF, a row is two whole dialogues; the prompt is what they share, up to the last "Assistant:"."""
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: a joke?\n\nAssistant:"
    read = common.read_preference({"chosen": start + " A man walks", "rejected": start + " A man sits"})
    assert (read.prompt, *read.answers) == (start, " A man walks", " A man sits")
    with pytest.raises(ValueError):
        common.read_preference({"chosen": "yes", "rejected": "no"})


def test_every_form_of_preference_row(tmp_path, capsys):
    turn = {"role": "user", "content": "hi"}
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2, "responses": None},
            {"prompt": "p", "responses": ["a", "b", "a", "c"], "scores": None},
            {"prompt": [turn], "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
            {"chosen": [turn, {"role": "assistant", "content": "a"}],
             "rejected": [turn, {"role": "assistant", "content": "b"}]},
            {"chosen": "Human: x Assistant: a", "rejected": "Human: x Assistant: b"},
            {"prompt": "p", "chosen": "same", "rejected": "same"},
            {"prompt": "p", "chosen": "a", "rejected": "b", "tie": True}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    read = common.read_preferences(str(path))
    assert [p.answers for p in read] == [["a", "b"], ["a", "b", "c"], ["a", "b"], ["a", "b"], [" a", " b"]]
    assert [p.margin for p in read] == [2, 0, 0, 0, 0]
    assert read[1].scores == [4, 3, 1]  # the second "a" is dropped
    assert read[3].prompt == [turn] == read[2].prompt
    assert "left out 2 of 7 rows" in capsys.readouterr().err


def test_answers_are_cut_where_the_context_ends(capsys):
    tokenizer = common.tiny_tokenizer()
    tokenizer.model_max_length = 10
    cfg = types.SimpleNamespace(model="tiny", system_prompt="", thinking="auto", max_prompt_tokens=99,
                                max_completion_tokens=99)
    preference = common.Preference("12+34=?", [], ["46", "<think>2+4=6"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, cfg, "--data")
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<eos>", "<think>2+"]  # 7 + 3 tokens
    assert "--data: cut 1 of 2 answers" in capsys.readouterr().err


@pytest.mark.parametrize("row, message", [
    ({"prompt": "p", "chosen": "a"}, "want chosen and rejected"),
    ({"prompt": "p", "responses": ["a"]}, "two or more"),
    ({"prompt": "p", "chosen": 3, "rejected": "b"}, "want chosen and rejected"),
    ({"chosen": "a", "rejected": "b"}, "dialogues"),
    ({"prompt": [1], "chosen": "a", "rejected": "b"}, "want a prompt"),
    ({"responses": ["a", "b", "c"]}, "no prompt"),
    ({"prompt": "p", "responses": ["a", "b"], "scores": [1, float("nan")]}, "scores must be"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("inf")}, "margin must be a number"),
    ({"chosen": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}],
      "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]},
     "want conversations that share"),
    ({"chosen": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}],
      "rejected": [{"role": "user", "content": "p"}, {"role": "user", "content": "b"}]},  # of either one
     "want conversations that end with an answer"),
    ({"chosen": [{"role": "assistant", "content": "a"}],
      "rejected": [{"role": "assistant", "content": "b"}]},
     "no prompt"),
    ({"prompt": [1], "responses": [[{"role": "assistant", "content": text}] for text in "ab"]}, "want a prompt")])
def test_broken_preference_rows_are_named(tmp_path, row, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n" + json.dumps(row))
    with pytest.raises(common.UserError, match=f"pairs.jsonl line 2: .*{message}"):
        common.read_preferences(str(path))


def test_pair_accuracy_is_of_the_implicit_reward_and_a_tie_is_none():
    """First pair: y⁻ is the likelier one, but h = (−3 + 9) − (−1 + 2) = 5 > 0 is right. Second pair: h = 0 is not."""
    _, stats = dpo.dpo_loss(*(torch.tensor([x, -1.0]) for x in (-3.0, -1.0, -9.0, -2.0)), beta=1.0)
    assert stats["pair_accuracy"] == 0.5
    assert stats["chosen_logprobs"] == -2 and stats["rejected_logprobs"] == -1


def test_a_step_without_a_pair_makes_no_update(tmp_path, monkeypatch):
    """All rewards are equal, so all pairs tie: the learning rate's warm-up does not advance either."""
    (tmp_path / "reward.py").write_text("def same(prompt, completion, row):\n    return 1.0\n")
    steps = record_run(monkeypatch, "dpo.py", tmp_path / "run", "--on_policy", "--steps", 2, "--pairs_per_step", 2,
                       "--warmup_steps", 2, "--reward", f"{tmp_path / 'reward.py'}:same")
    found = [(step.updates, step.metrics["ties"], step.metrics["lr"], step.metrics["loss"]) for step in steps]
    assert found == [([], 2, 0, 0)] * 2
    assert all(step.metrics["pair_accuracy"] is step.metrics["margin"] is None for step in steps)


def test_problems_without_answers_may_be_judged_by_a_function(tmp_path):
    (tmp_path / "reward.py").write_text("def f(prompt, completion, row): return len(completion)\n")
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=?"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=?", "chosen": "2", "rejected": "3"}\n')
    flags = ["--steps", 1, "--pairs_per_step", 1, "--data", tmp_path / "pairs.jsonl", "--eval_data",
             tmp_path / "pairs.jsonl", "--eval_problems", tmp_path / "problems.jsonl", "--output_dir", tmp_path / "run"]
    assert "problems.jsonl line 1: no answer" in run_script("dpo.py", *flags, code=2)  # for the verifier
    run_script("dpo.py", *flags, "--reward", f"{tmp_path / 'reward.py'}:f")
    (tmp_path / "problems.jsonl").write_text('{"prompt": "who?", "answer": "2"}\n')
    assert "error: --eval_problems: the tiny model reads digits" in run_script("dpo.py", *flags, "--overwrite", code=2)
    assert {"eval_reward", "eval_pair_accuracy"} <= read_metrics(tmp_path / "run")[1].keys()


def test_all_pairs_of_a_ranking_are_trained_on(tmp_path, monkeypatch):
    """Three ranked answers make three pairs: the first is chosen in two of them, the last rejected in two."""
    path = tmp_path / "ranked.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=?", "responses": ["2", "11", "3"]}) + "\n")
    [step] = record_run(monkeypatch, "dpo.py", tmp_path / "run", "--data", path, "--eval_data", path, "--steps", 1,
                        "--pairs_per_step", 3)
    assert sorted(pair.answers for pair in step.batches[0]) == [["11", "3"], ["2", "11"], ["2", "3"]]
    tokenizer, policy = common.tiny_tokenizer(), load_tiny_model()
    ids = {text: tokenizer.encode(text) + [tokenizer.eos_token_id] for text in ("2", "11", "3")}

    def logprob(text):
        """log π(y|x) of an answer, EOS included."""
        next_token = distributions(policy, torch.tensor(tokenizer.encode("1+1=?") + ids[text]), len(ids[text]))
        return next_token.log_prob(torch.tensor(ids[text])).sum().item()

    assert step.metrics["chosen_logprobs"] == pytest.approx((2 * logprob("2") + logprob("11")) / 3, rel=1e-4)
    assert step.metrics["rejected_logprobs"] == pytest.approx((2 * logprob("3") + logprob("11")) / 3, rel=1e-4)
    assert step.metrics["loss"] == pytest.approx(math.log(2), rel=1e-4)  # h = 0: each pair has its own references


def test_the_evaluation_is_over_all_pairs_of_all_rankings(monkeypatch):
    """Three ranked answers have log π/π_ref = 3, 1 and 2, so with β = .1 the implicit rewards .3, .1 and .2. Their
    pairs differ by .2, .1 and −.1. A row of two answers with 0 and 5 differs by −.5. Two of these four are right."""
    rankings = [common.Preference("p", [5], [], [[6]] * K, list(range(K, 0, -1)), ref_logprobs=torch.ones(K))
                for K in (3, 2)]
    monkeypatch.setattr(dpo, "answer_logprobs", lambda *_: [torch.tensor([4.0, 2, 3]), torch.tensor([1.0, 6])])
    metrics = dpo.evaluate(None, None, rankings, [], None, dpo.Config(beta=0.1), "cpu")
    differences = torch.tensor([0.2, 0.1, -0.1, -0.5])
    assert metrics == pytest.approx({
        "eval_pair_accuracy": 2 / 4, "eval_margin": -0.3 / 4, "eval_chosen_reward": (0.3 + 0.3 + 0.1 + 0) / 4,
        "eval_rejected_reward": (0.1 + 0.2 + 0.2 + 0.5) / 4, "eval_loss": -differences.sigmoid().log().mean().item()})


def build_rankings():
    for split in ("train", "eval"):
        common.build_tiny_preferences("arithmetic", split)


def sample_rankings(folder, _):
    """Build the built-in rankings, which are then kept under runs/. This takes 20 s on one core."""
    ended_well(fork(folder / "stderr", build_rankings), folder / "stderr")


@beside(sample_rankings)
def test_a_run_on_the_built_in_rankings(job, tmp_path, monkeypatch):
    """It is evaluated on held-out problems. Before the first update all held-out pairs tie: policy and reference are
    equal, and computed in the same micro-batches, so their log-probs agree to the last bit."""
    asked = []

    def recorded(policy, tokenizer, problems, *rest):
        asked.extend(problems)
        return {}

    monkeypatch.setattr(common, "evaluate", recorded)
    monkeypatch.setattr(common, "AT_ONCE", 7)  # several collations
    said = run_script("dpo.py", "--steps", 1, "--pairs_per_step", 2, "--lr", 0, "--output_dir", tmp_path / "run")
    assert "computing the reference's log-probs" in said
    assert {p.prompt for p in asked} == {row["prompt"] for row in common.arithmetic_rows(2, "eval")}
    assert [line["eval_pair_accuracy"] for line in read_metrics(tmp_path / "run")] == [0.5, 0.5]


def test_no_rankings_of_what_the_tiny_model_cannot_do(tmp_path, monkeypatch):
    (tmp_path / "tiny").symlink_to(ROOT / common.build_tiny_model("arithmetic"))
    problems = common.read_problems("arithmetic", "eval")[:4]
    monkeypatch.setattr(common, "build_tiny_model", lambda data: str(tmp_path / "tiny"))
    monkeypatch.setattr(common, "read_problems", lambda *_: problems)
    monkeypatch.setattr(common, "is_equivalent", lambda *_: False)
    state = torch.get_rng_state()
    with pytest.raises(common.UserError, match="arithmetic: the tiny model answers none"):
        common.build_tiny_preferences("arithmetic", "eval")
    assert torch.equal(torch.get_rng_state(), state)  # else a run that samples them would draw other numbers
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]  # nothing is kept


def test_on_policy_the_higher_of_two_rewards_is_chosen(tmp_path, monkeypatch):
    """The longer one is chosen, whichever of them its reward function calls correct."""
    (tmp_path / "reward.py").write_text("def f(prompt, completion, row):\n"
                                        "    return 1 + len(completion), len(completion) % 2 == 0\n")
    [step] = record_run(monkeypatch, "dpo.py", tmp_path / "run", "--on_policy", "--steps", 1, "--pairs_per_step", 8,
                        "--temperature", 1.3, "--reward", f"{tmp_path / 'reward.py'}:f")
    [rollout], policy = step.rollouts, load_tiny_model()
    lengths = torch.tensor(list(map(len, rollout.completions))).view(8, 2)
    untied = (lengths[:, 0] != lengths[:, 1]).nonzero()[:, 0]
    longer = (2 * untied + lengths[untied].argmax(1)).tolist()  # row numbers
    chosen = [plain_logprobs(policy, rollout, i, 1.3).sum().item() for i in longer]
    assert step.metrics["ties"] == 8 - len(untied) < 8
    assert step.metrics["accuracy"] == pytest.approx((lengths % 2 == 0).float().mean().item())
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(row["completion"], row["reward"]) for row in samples] == [
        (text, 1 + len(text)) for text in rollout.completions[:8]] and "advantage" not in samples[0]
    assert step.metrics["chosen_logprobs"] == pytest.approx(sum(chosen) / len(chosen), rel=1e-4)
