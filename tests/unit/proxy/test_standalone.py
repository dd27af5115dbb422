"""The stand-alone program says in plain words what is wrong with a model that is not what it should be."""

from __future__ import annotations

import logging
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.proxy import standalone
from rollout.proxy.standalone import ProxyOptions, StandAlone, load_policy


async def test_the_model_can_be_asked_for_by_name_and_health_names_no_address() -> None:
    proxy = StandAlone(ProxyOptions("http://127.0.0.1:9", "a/model", "hermes", token="right"))
    proxy.model = standalone._ListedModel("a/model", 100)
    await proxy.start()
    proxy.problem = await proxy._ask_engine()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{proxy.port}") as http:
        for path, scheme, status in [
            ("/a/model", "Bearer", 200),
            ("/a%2Fmodel", "bearer", 200),
            ("/other", "BEARER", 404),
            ("/a/model", "Basic", 401),
        ]:
            async with http.get(f"/v1/models{path}", headers={"Authorization": f"{scheme} right"}) as response:
                said = await response.json()
            assert response.status == status and (status != 200 or said["id"] == "a/model")
        async with http.get("/health") as response:
            said = await response.text()
        assert response.status == 503 and "unreachable" in said and "127.0.0.1" not in said
    await proxy.stop()


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"model_type": "none such"}'])
def test_a_broken_model_is_said_in_words_of_our_own(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"^its config.json is missing or cannot be read \(\w+\)$"):
        load_policy(ProxyOptions("", str(tmp_path), "hermes"))


def test_a_model_with_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^its tokenizer is missing or cannot be read \(\w+\)$"):
        load_policy(ProxyOptions("", str(tmp_path), "hermes"))


def test_a_name_that_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no model of this name could be loaded from the hub"):
        load_policy(ProxyOptions("", "nobody/no-such-model", "hermes"))


@pytest.mark.parametrize(
    ("model", "served", "warned"),
    [
        ("m", {"id": "m"}, ""),
        ("/models/m/", {"id": "policy", "root": "/models/m"}, ""),
        (
            "/models/m",
            {"id": "policy", "root": "/models/other"},
            "serves policy (/models/other) and not --model /models/m",
        ),
        ("m", {"id": "other"}, "serves other and not --model m"),
    ],
)
async def test_an_engine_that_serves_another_model_is_named(
    model: str, served: dict[str, str], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 100, **served}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as engine:
        proxy = StandAlone(ProxyOptions(str(engine.make_url("")).rstrip("/"), model, "hermes"))
        await proxy.start()
        with caplog.at_level(logging.WARNING):
            assert await proxy._ask_engine() == ""
        await proxy.stop()
    assert (warned in caplog.text) if warned else not caplog.text
