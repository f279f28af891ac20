import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from eaglefeed.config import Settings, load_settings
from eaglefeed.errors import ConfigError


def _file(tmp_path: Path, **sections: object) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_the_command_line_wins_over_variables_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, feed={"max_length": 11, "batch_size": 12}, target={"dtype": "float32", "num_threads": 3})
    monkeypatch.setenv("EAGLEFEED_FEED__BATCH_SIZE", "22")
    monkeypatch.setenv("EAGLEFEED_TARGET__NUM_THREADS", "23")
    settings = load_settings(path, ["target.num_threads=33"])
    assert settings.feed.max_length == 11
    assert settings.feed.batch_size == 22
    assert settings.target.num_threads == 33
    assert settings.target.dtype == "float32"
    assert settings.target.device == "cpu"


def test_of_two_words_for_one_setting_the_last_wins() -> None:
    assert load_settings(None, ["feed.max_length=3", "feed.max_length=4"]).feed.max_length == 4


@pytest.mark.parametrize("run_id", ["123", "2026-11-30", "1e5", "true", "null", "a.b-c_d"])
def test_a_run_id_is_a_text_whatever_it_looks_like(run_id: str) -> None:
    assert load_settings(None, [f"run.id={run_id}"]).run.id == run_id


def test_a_run_id_in_a_file_may_look_like_a_number(tmp_path: Path) -> None:
    assert load_settings(_file(tmp_path, run={"id": 123})).run.id == "123"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "-x", "a" * 65, "a b"])
def test_a_run_id_that_cannot_name_a_folder_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.id"):
        load_settings(None, [f"run.id={run_id}"])


@pytest.mark.parametrize("spelling", ["1,14,26", "[1, 14, 26]", "1, 14, 26"])
def test_layer_ids_on_the_command_line(spelling: str) -> None:
    assert load_settings(None, [f"target.aux_layer_ids={spelling}"]).target.aux_layer_ids == (1, 14, 26)


def test_layer_ids_in_a_file(tmp_path: Path) -> None:
    assert load_settings(_file(tmp_path, target={"aux_layer_ids": [3, 2, 1]})).target.aux_layer_ids == (3, 2, 1)


def test_what_a_template_is_told_comes_from_a_file_a_variable_or_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"enable_thinking": False, "k": {"é": [1, None]}}
    file, text = _file(tmp_path, target={"chat_template_kwargs": told}), json.dumps(told)
    assert load_settings(file).target.chat_template_kwargs == told
    assert load_settings(None, [f"target.chat_template_kwargs={text}"]).target.chat_template_kwargs == told
    assert load_settings().target.chat_template_kwargs == {}
    monkeypatch.setenv("EAGLEFEED_TARGET__CHAT_TEMPLATE_KWARGS", text)
    assert load_settings().target.chat_template_kwargs == told


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("feed.max_lenght=3", "feed.max_lenght"),
        ("fede.max_length=3", "fede"),
        ("feed.max_length=many", "feed.max_length"),
        ("feed.max_length=1", "feed.max_length"),
        ("target.dtype=int4", "target.dtype"),
        ("target.aux_layer_ids=1,2", "target.aux_layer_ids"),
        ("target.aux_layer_ids=a,b,c", "target.aux_layer_ids"),
        ("target.chat_template_kwargs={bad", "target.chat_template_kwargs"),
        ("target.chat_template_kwargs=[1]", "target.chat_template_kwargs"),
        ('target.chat_template_kwargs={"messages": []}', "messages is what a template gets of each conversation"),
        ('target.chat_template_kwargs={"a b": 1}', "target.chat_template_kwargs"),
        ("target.chat_template_date=today", "target.chat_template_date"),
        ("queue.visibility_timeout_s=0", "queue.visibility_timeout_s"),
        ("queue.groups=", "queue.groups"),
        ("queue.groups=a,a", "queue.groups"),
        ("queue.groups=a,-b", "queue.groups"),
        ("train.group=a b", "train.group"),
        ("queue.low_count=100001", "low_count 100001 is above high_count 100000"),
        ("queue.low_bytes=68719476737", "low_bytes 68719476737 is above high_bytes 68719476736"),
    ],
)
def test_what_cannot_be_set_is_named(word: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_settings(None, [word])


def test_groups_are_a_list_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().queue.groups == ("main",)
    for spelling in ("own,ema", "[own, ema]", "['own', 'ema']"):
        assert load_settings(None, [f"queue.groups={spelling}"]).queue.groups == ("own", "ema")
    assert load_settings(_file(tmp_path, queue={"groups": ["own", "ema"]})).queue.groups == ("own", "ema")
    monkeypatch.setenv("EAGLEFEED_QUEUE__GROUPS", "own, ema")
    monkeypatch.setenv("EAGLEFEED_TARGET__AUX_LAYER_IDS", "3,2,1")
    assert load_settings().queue.groups == ("own", "ema")
    assert load_settings().target.aux_layer_ids == (3, 2, 1)
    monkeypatch.setenv("EAGLEFEED_QUEUE__GROUPS", '["own", "ema"]')
    assert load_settings().queue.groups == ("own", "ema")


def test_a_low_mark_that_is_not_given_follows_its_high_mark() -> None:
    queue = load_settings(None, ["queue.high_count=10", "queue.high_bytes=1000"]).queue
    assert (queue.low_count, queue.low_bytes) == (5, 750)


def test_supervision_that_is_not_given_follows_the_vocabulary_map() -> None:
    assert load_settings().produce.supervision == "logits"
    assert load_settings(None, ["produce.vocab=v.safetensors"]).produce.supervision == "target_probs"
    words = ["produce.vocab=v.safetensors", "produce.supervision=last_hidden_states"]
    assert load_settings(None, words).produce.supervision == "last_hidden_states"


def test_a_password_comes_by_variable_never_shows_and_is_refused_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="the process list would show it") as caught:
        load_settings(None, ["queue.password=hunter2"])
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD", "0123")
    settings = load_settings()
    assert settings.queue.password is not None
    assert settings.queue.password.get_secret_value() == "0123"
    assert "0123" not in f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD_FILE", "somewhere")
    with pytest.raises(ConfigError, match="both password and password_file") as caught:
        load_settings()
    assert "0123" not in str(caught.value)


def test_an_empty_password_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_QUEUE__PASSWORD", "")
    with pytest.raises(ConfigError, match=r"queue\.password"):
        load_settings()


@pytest.mark.parametrize("url", ["redis://u:hunter2@h:1", "rediss://:hunter2@h", "unix:///s?password=hunter2"])
def test_an_address_with_a_password_is_refused_on_the_command_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the process list would show its password") as caught:
        load_settings(None, [f"redis_url={url}"])
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", url)
    assert load_settings().redis_url == url
    for plain in ("redis://user@h:1/0", "unix:///a:b@c/s.sock"):
        assert load_settings(None, [f"redis_url={plain}"]).redis_url == plain


def test_a_token_that_is_too_short_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_ACCESS__TOKEN", "hunter2")
    with pytest.raises(ConfigError, match=r"access\.token: .*wanted at least 16 characters;") as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: [")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_settings(path)
    with pytest.raises(ConfigError, match="nowhere"):
        load_settings(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("text", ["*hunter2", "!hunter2", "'hunter2\n"])
def test_what_is_wrong_with_a_file_is_told_without_what_stands_there(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"queue:\n  password: {text}")
    with pytest.raises(ConfigError, match=r"got line 2, column 13|got line 3, column 1") as caught:
        load_settings(path)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_REDISURL", "redis://x")
    with pytest.raises(ConfigError, match="EAGLEFEED_REDISURL"):
        load_settings()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "train.samples_per_step=0",
            "train.samples_per_step: a value that cannot be used, wanted greater than 0, got '0'",
        ),
        ("train.prefetch=two", "wanted a valid integer, got 'two'"),
        ("train.dtype=float8", "wanted 'float32' or 'bfloat16', got 'float8'"),
        ("run.id=../x", "wanted pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$', got '../x'"),
        ("queue.groups=a,a", "queue.groups: a name is listed twice, got 'a,a'"),
        (
            "feed.max_len=5",
            "feed.max_len: no such setting, wanted batch_size, keep_open, max_length, max_line_bytes, max_rej",
        ),
        ("serve.port=" + "9" * 500, "wanted less than or equal to 65535, got '999"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_with_what_is_wanted(word: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, [word])
    assert told in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [("EAGLEFEED_ACCESS__TOKEN", "hunter2"), ("EAGLEFEED_QUEUE__PASSWROD", "hunter2")],
)
def test_a_secret_that_cannot_be_used_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert "wanted" in str(caught.value)
    assert value not in str(caught.value)


def test_an_address_with_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, ["train.group=me:hunter2@there"])
    assert "hunter2" not in str(caught.value)


def test_settings_are_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.run.id = "other"


def test_a_run_has_its_own_folders() -> None:
    settings = load_settings(None, ["run.id=x", "run.dir=/tmp/all"])
    assert settings.store_uri == "file:///tmp/all/x/shards"
    assert settings.train_output == Path("/tmp/all/x/draft")
    assert load_settings(None, ["store.uri=mem://y"]).store_uri == "mem://y"


def test_the_defaults_hold_together() -> None:
    queue = Settings().queue
    assert queue.low_count < queue.high_count <= queue.max_depth
    assert queue.low_bytes < queue.high_bytes
