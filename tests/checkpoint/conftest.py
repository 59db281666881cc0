"""What the checkpoint tests share."""

import pytest
from hf_folders import CONFIGS, make_hf


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """{name of CONFIGS: Hugging Face folder}"""
    return {name: make_hf(tmp_path_factory.mktemp("hf") / "model", config) for name, config in CONFIGS.items()}
