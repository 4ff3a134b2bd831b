"""Lets vLLM's worker process count the rows of which it computes logits."""


class RecordedLogits:
    """An extension of vLLM's worker (`worker_extension_cls`)."""

    def record_logits(self) -> None:
        self.rows = []
        model = self.model_runner.model
        compute_logits = model.compute_logits

        def recorded(hidden_states, *args, **kwargs):
            self.rows.append(len(hidden_states))
            return compute_logits(hidden_states, *args, **kwargs)

        model.compute_logits = recorded

    def recorded_rows(self) -> list[int]:
        return self.rows
