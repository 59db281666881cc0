"""Row numbering and micro-batches: every real token keeps its sequence and position in every layout."""

import numpy as np
import pytest
import torch

from megatron_ext.train import microbatch
from megatron_ext.train.batch import FILLER, TokenSequence, make_microbatches
from megatron_ext.train.microbatch import RowLayout


def sequences(*lengths, prompt_len=1):
    return [TokenSequence(i, tuple(range(100 * i, 100 * i + n)), prompt_len, advantage=float(i)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("layout", [RowLayout.padded(6, 3), RowLayout.packed([3, 5, 2], multiple_of=4)], ids=["padded", "packed"])
def test_rows_and_back(layout):
    x = torch.arange(layout.seq * layout.batch * 2).view(layout.seq, layout.batch, 2)
    rows = layout.rows(x)
    assert torch.equal(layout.unrows(rows), x)
    assert torch.equal(rows[layout.row_ids(0, layout.seq)].view_as(x), x)
    half = layout.row_ids(layout.seq // 2, layout.seq - layout.seq // 2)
    assert torch.equal(rows[half].view(-1, layout.batch, 2), x[layout.seq // 2 :])


def test_packing_keeps_padding_in_a_sequence_of_its_own():
    layout = RowLayout.packed([3, 5, 2], multiple_of=4)
    assert layout.cu_seqlens.tolist() == [0, 3, 8, 10, 12]
    assert layout.positions_R.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1]
    assert layout.sequence_ids().tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3]


def test_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="micro-batch of \\(6, 3\\)"):
        RowLayout.padded(6, 3).rows(torch.zeros(5, 3))


def test_layout_is_active_only_inside():
    with microbatch.active(RowLayout.padded(2, 1)) as layout:
        assert microbatch.current() is layout
    with pytest.raises(RuntimeError, match="no active micro-batch"):
        microbatch.current()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_every_response_token_is_predicted_by_the_row_before_it(pack, micro_batch_size):
    wanted = sequences(7, 3, 9, 4, prompt_len=2)
    seen = {}
    for rank in range(2):
        for batch in make_microbatches(wanted, micro_batch_size, rank, 2, pack, temperature=1.0, multiple_of=4):
            flat = batch.ids.view(-1)
            rows, targets = batch.prediction.rows_P, batch.prediction.targets_P
            real = [s for s in batch.sequences if s.index >= 0]
            assert batch.layout.seq % 4 == 0 and batch.num_tokens == sum(s.response_len for s in real)
            assert torch.equal(flat[rows + 1], targets)
            seen.update(batch.split(targets))
    assert {index: part.tolist() for index, part in seen.items()} == {s.index: list(s.tokens[2:]) for s in wanted}


def test_ranks_have_equally_many_microbatches():
    counts = {len(make_microbatches(sequences(2, 3, 4), 1, rank, 4, True, 1.0, 1)) for rank in range(4)}
    last = make_microbatches(sequences(2, 3, 4), 1, 3, 4, True, 1.0, 1)
    assert counts == {1} and last[0].sequences == (FILLER,) and last[0].num_tokens == 0


@pytest.mark.parametrize("prompt_len", [0, 3])
def test_a_sequence_needs_a_prompt_and_a_response(prompt_len):
    with pytest.raises(ValueError, match="prompt_len"):
        TokenSequence(0, (1, 2, 3), prompt_len)


def test_numbers_per_token():
    """Sequences without old logprobs take those that are given; fillers count for nothing."""
    old = np.array([-1.0, -2.0], np.float32)
    pair = [TokenSequence(0, (1, 2, 3), 1, advantage=0.5, old_logprobs=old), TokenSequence(1, (1, 2, 3, 4), 2, advantage=-1.0)]
    (batch,) = make_microbatches(pair, 3, 0, 1, True, 1.0, 1)
    assert batch.per_token(lambda s: s.advantage).tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.logprobs("old_logprobs", torch.arange(4.0)).tolist() == [-1.0, -2.0, 2.0, 3.0]
    last = make_microbatches(pair, 1, 2, 3, True, 1.0, 1)[0]
    assert (last.num_tokens, last.num_sequences, last.per_token(lambda s: 1.0).tolist()) == (0, 0, [0.0])


@pytest.mark.parametrize("old", [np.zeros(3, np.float32), np.zeros(2, np.float64)])
def test_logprobs_of_another_length_or_type_are_refused(old):
    with pytest.raises(ValueError, match=r"sequence 4 \(prompt 2\): old_logprobs: expected float32 \[2\]"):
        TokenSequence(4, (1, 2, 3), 1, old_logprobs=old, label="prompt 2")


def test_place_of_a_predicted_token():
    (batch,) = make_microbatches(sequences(3, 4), 2, 0, 1, True, 1.0, 1)
    assert batch.prediction.place(0) == "sequence 0, response position 0"
    assert batch.prediction.place(2) == "sequence 1, response position 0"
    assert batch.prediction.place(4) == "sequence 1, response position 2"
