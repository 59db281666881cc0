"""The model that the training tests share."""

import pytest
from models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Hugging Face folder of a small random Qwen3-MoE."""
    return make_model(tmp_path_factory.mktemp("train_model") / "hf")
