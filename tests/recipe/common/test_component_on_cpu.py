"""`data.sampler.band` in a trainer: which prompts a step gets, from the rewards of the steps before."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from recipe.common.component import DATA_ROW, SolveRates
from tests.trainer.ppo.toy_step import MemoryQueue, trainer_of
from verl.trainer.ppo.v1.batch_rows import BatchRows

# true solve rate of each row; the band is 0.1 to 0.9
TRUE = [0.0, 0.5, 1.0, 0.25, 0.75, 0.0, 1.0, 0.5]


class Data(SimpleNamespace):
    """The parts of upstream's data set that the component reads."""

    def __len__(self):
        return len(self.dataframe)

    def __getitem__(self, row):
        return self.dataframe[row]


def component_of(solve_rates=None, **values):
    values = {"band": "0.1:0.9", "unknown_share": 0.2} | values
    sampler = {f"data.sampler.{key}": value for key, value in values.items()}
    trainer = trainer_of(sampler | {"data.train_batch_size": 4, "data.seed": 1})
    infos = {"extra_info": [{"solve_rate": rate} for rate in solve_rates]} if solve_rates else {"prompt": ["?"] * 8}
    trainer.train_dataset = Data(dataframe=Dataset.from_dict(infos))
    trainer.train_dataloader = SimpleNamespace(batch_size=4)
    (component,) = (each for each in trainer.components if isinstance(each, SolveRates))
    return component, component.train_dataloader(trainer)


def add_row(queue, key: str, row: int, acc: float | None, **fields):
    info = {} if acc is None else {"acc": acc}
    fields |= {DATA_ROW: row, "extra_fields": {"reward_extra_info": info}}
    queue.add(key, 3.0, [1, 1], **{"dropped": [0, 0]} | fields)


def add_group(queue, uid: str, row: int, accs):
    for session, acc in enumerate(accs):
        add_row(queue, f"{uid}_{session}_0", row, acc)


@pytest.fixture
def queue(monkeypatch):
    return MemoryQueue(monkeypatch)


def train(component, loader, queue, n_steps: int) -> list[list[int]]:
    """Train steps whose groups of 4 are right at the rows' true rates; return the rows of each step."""
    batches, steps = iter(loader), []
    for _ in range(n_steps):
        rows = next(batches)[DATA_ROW].tolist()
        queue.rows.clear()
        for row in dict.fromkeys(rows):
            add_group(queue, f"u{row}", row, [float(k < 4 * TRUE[row]) for k in range(4)])
        component.after_advantage(BatchRows(queue.batch()), {})
        steps.append(rows)
    return steps


def test_steps_converge_to_the_band_and_measure_old_rates_again(queue):
    steps = train(*component_of(), queue, 60)
    assert len(set(steps[0])) == 4  # all unknown: each once
    later = [row for step in steps[5:] for row in step]
    share = sum(0.1 <= TRUE[row] <= 0.9 for row in later) / len(later)
    assert 0.7 < share < 0.9 and set(later) == set(range(8))


@pytest.mark.parametrize("saved", [1, 2, 5])
def test_a_resumed_run_draws_the_same_prompts(queue, saved):
    whole, loader = component_of()
    batches = iter(loader)

    class Rest:
        def __iter__(self):
            return batches

    train(whole, Rest(), queue, saved)
    state = loader.state_dict()
    resumed, resumed_loader = component_of()
    resumed_loader.load_state_dict(state)
    assert train(resumed, resumed_loader, queue, 12) == train(whole, Rest(), queue, 12)
    other, other_loader = component_of([0.5, 0.5, 0.5, 0.5])
    other_loader.load_state_dict(state)
    with pytest.raises(ValueError, match="has 4 rows, and the checkpoint's solve rates are of 8"):
        iter(other_loader)


def test_the_data_may_know_rates(queue):
    known = [None if row in (1, 2) else rate for row, rate in enumerate(TRUE)]
    _, loader = component_of(known, unknown_share=0.0)
    # three rows in the band, then an unknown one; a row rests for a step
    rows = next(iter(loader))[DATA_ROW].tolist()
    assert set(rows[:3]) == {3, 4, 7} and rows[3] in (1, 2)
    with pytest.raises(ValueError, match="row 1: extra_info.solve_rate=1.5: expected 0 to 1"):
        component_of([0.5, 1.5])


def test_rates_of_a_step_and_of_dropped_groups(queue):
    component, _ = component_of([0.5, 0.5, 0.5, 0.5])
    add_group(queue, "a", 0, [1.0, 1.0])
    add_group(queue, "b", 1, [None, None])  # without acc the reward counts, 3.0, cut to 1
    add_group(queue, "c", 2, [-1.0, 1.0, 0.0, 1.0])
    # a trajectory of two rows counts once, and a step that the search dropped is no answer
    add_row(queue, "c_3_1", 2, 1.0)
    add_row(queue, "c_4_0", 2, 0.0, dropped=[0, 1])
    component.on_drop(BatchRows(queue.batch("a")))
    assert component.sampler.rates.tolist() == [0.5] * 4  # not before the update
    metrics = {}
    component.after_advantage(BatchRows(queue.batch("b", "c")), metrics)
    assert component.sampler.rates.tolist() == [0.75, 0.75, 0.5, 0.5]
    assert metrics == {
        "sampler/in_band_share": 1.0,
        "sampler/unknown_share": 0.0,
        "sampler/mean_solve_rate": pytest.approx(0.625),
        "sampler/seen_in_band_share": pytest.approx(1 / 3),
    }
    component.after_advantage(BatchRows(queue.batch("b")), metrics)
    assert component.sampler.rates.tolist() == [0.75, 0.875, 0.5, 0.5]  # a dropped group counts once


def test_prompts_of_a_run_without_the_sampler_change_nothing(queue):
    component, _ = component_of([0.5, 0.5, 0.5, 0.5])
    queue.add("a_0_0", 1.0, [1, 1], extra_fields={})
    component.after_advantage(BatchRows(queue.batch()), {})
    assert component.sampler.rates.tolist() == [0.5] * 4
