"""What people read after typical mistakes with OffloadConfig, word for word."""

import pytest
from pydantic import ValidationError

from ftd.config.load_offload import load_config, load_config_from_file
from ftd.config.offload import OffloadConfig
from ftd.errors import OffloadConfigError
from tests.unit.config.offload_files import environment


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "include_pattern: [a]", "unknown key 'include_pattern': the nearest known one is 'include_patterns'"
         " ({file}, line 1)"),
        ("c.yaml", "enabled: true\noffload_timing: off",
         "offload_timing: found false (YAML reads off as false: quote it), expected off, eager or cuda_graph "
         "({file}, line 2)"),
        ("c.yaml", "shm_namespace: no",
         "shm_namespace: found false (YAML reads no as false: quote it), expected a namespace: 1 to 64 of A-Z a-z 0-9 "
         ". _ - starting with a letter or digit ({file}, line 1)"),
        ("c.yaml", "num_blocks: yes",
         "num_blocks: found true (YAML reads yes as true), expected a whole number of 2 or more ({file}, line 1)"),
        ("c.yaml", "exclude_patterns: [*.norm]",
         '{path}: line 1, column 21: YAML reads a leading * as an alias: quote it, as in "*.blocks.*"'),
        ("c.yaml", "include_patterns: layers.*",
         "include_patterns: found 'layers.*', expected a list of patterns such as [layers.*] ({file}, line 1)"),
        ("c.yaml", "num_blocks: 2",
         "min_blocks: found 4 (default), expected at most num_blocks, which is 2 ({file}, line 1)"),
        ("c.json", '{"max_gpu_mem_fraction": 90}',
         "max_gpu_mem_fraction: found 90, expected a number above 0 and at most 1, such as 0.9 ({file})"),
        ("c.json", '{"shm_enabled": true}',
         "shm_namespace: found nothing (default), expected a namespace (1 to 64 of A-Z a-z 0-9 . _ - starting with a "
         "letter or digit), since shm_enabled is true ({file})"),
        ("c.ini", "[flextensor]\nprofile_mode = torch_function\n",
         "profile_mode: found 'torch_function' ({file}), expected view or getter, since transfer_mode is "
         "allocation_block_transfer (default)"),
        ("c.ini", "[flextensor]\ntransfer_mode = strategy\noffload_timing = eager\n",
         "offload_timing: found 'eager' ({file}), expected off, since transfer_mode is strategy ({file})"),
        ("c.ini", "[flextensor]\ntransfer_mode = strategy\nexternal_compile = yes\n",
         "transfer_mode: found 'strategy' ({file}), expected allocation_block_transfer or raw_block_transfer, since "
         "external_compile is true ({file})"),
        ("c.ini", "[flextensor]\nexclude_patterns = cls:Expert\n",
         "exclude_patterns[0]: pattern 'cls:Expert' has the form 'cls:', expected name:<glob> or class:<glob> "
         "({file})"),
        ("c.ini", "num_blocks = 5\n", "{path}: line 1: found no section before it, expected [flextensor]"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with environment(), pytest.raises(OffloadConfigError) as caught:
        load_config(path)
    expected = message.replace("{file}", f"file {path}").replace("{path}", str(path))
    assert str(caught.value) == f"{expected}\n  → correct {path}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FT_NUMBLOCKS", "2", "unknown variable FT_NUMBLOCKS: the nearest known one is FT_NUM_BLOCKS"),
        ("FT_SHM__ENABLED", "1", "unknown variable FT_SHM__ENABLED: the nearest known one is FT_SHM_ENABLED"),
        ("FT_ENABLED", "ja", "enabled: found 'ja', expected true or false ($FT_ENABLED)"),
        ("FT_NUM_BLOCKS", "two", "num_blocks: found 'two', expected a whole number of 2 or more ($FT_NUM_BLOCKS)"),
        (
            "FT_MAX_GPU_MEM_FRACTION",
            "90%",
            "max_gpu_mem_fraction: found '90%', expected a number above 0 and at most 1, such as 0.9 "
            "($FT_MAX_GPU_MEM_FRACTION)",
        ),
        (
            "FT_LOAD_STRATEGY",
            "auto",
            "load_strategy: found 'auto', expected a strategy object, which only Python code can give "
            "($FT_LOAD_STRATEGY)",
        ),
    ],
)
def test_mistakes_in_the_environment(name, value, message):
    with environment(**{name: value}), pytest.raises(OffloadConfigError) as caught:
        load_config()
    assert str(caught.value) == f"{message}\n  → correct ${name}"


def test_a_path_to_nowhere(tmp_path):
    path = tmp_path / "offload.yaml"
    with environment(FT_CONFIG_FILE=str(path)), pytest.raises(FileNotFoundError) as caught:
        load_config()
    assert str(caught.value) == (
        f"configuration file {path} ($FT_CONFIG_FILE): no such file or directory, expected a file"
        "\n  → correct $FT_CONFIG_FILE"
    )
    with environment(), pytest.raises(FileNotFoundError) as caught:
        load_config_from_file()
    assert str(caught.value) == (
        "no configuration file: found neither an argument nor $FT_CONFIG_FILE, expected a path in one of them"
        "\n  → pass config_path, or set FT_CONFIG_FILE"
    )


def test_a_mistake_in_python():
    with pytest.raises(ValidationError) as caught:
        OffloadConfig(transfer_mode="strategy", offload_timing="eager")
    (error,) = caught.value.errors()
    assert error["msg"] == "expected off, since transfer_mode is strategy"
