"""This module has a stand-in for wandb's server on loopback, as far as its client asks: GraphQL, file streams,
uploads.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "f" * 40
ENTITY = "somebody"
ROOT = Path(__file__).parents[1]


@dataclass
class Run:
    """What a run has sent. ``config`` and ``summary`` have wandb's own keys, too; ``history`` is by line number."""

    project: str
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # exit codes

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self.history[number] for number in sorted(self.history)]


class Wandb:
    """``asked``: the names of all operations; ``unknown``: those that were not understood; ``stored``: uploads."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[str, Run] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.unknown: list[str] = []
        self.refused: list[str] = []

    async def graphql(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}":
            self.refused.append(request.path)
            return web.json_response({"errors": [{"message": "invalid key"}]}, status=401)
        body = await request.json()
        found = re.search(r"\b(?:query|mutation)\s+(\w+)", body["query"])
        name = found[1] if found else ""
        self.asked.append(name)
        answer = getattr(self, f"on_{name}", None)
        if answer is None:
            self.unknown.append(name or body["query"])
            return web.json_response({"errors": [{"message": f"there is no {name}"}]})
        return web.json_response({"data": answer(defaultdict(lambda: None, body.get("variables") or {}))})

    async def stream(self, request: web.Request) -> web.Response:
        run, body = self.runs[request.match_info["run"]], await request.json()
        for name, part in (body.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]] if name.endswith((".json", ".jsonl")) else []
            if name == "wandb-history.jsonl":
                run.history.update(enumerate(lines, part["offset"]))
            elif name == "wandb-summary.json":
                run.summary.update(lines[-1])
        if body.get("complete"):
            run.ended.append(body["exitcode"])
        return web.json_response({})

    async def store(self, request: web.Request) -> web.Response:
        self.stored[request.match_info["path"]] = await request.read()
        return web.Response()

    def _place(self, *parts: str) -> str:
        return "/".join([self.url, "storage", *parts])

    def _viewer(self) -> dict[str, Any]:
        none: dict[str, Any] = {"edges": []}
        about = {"id": "u", "name": ENTITY, "username": ENTITY, "email": "", "admin": False, "flags": "{}"}
        return {"viewer": about | {"entity": ENTITY, "deletedAt": None, "apiKeys": none, "teams": none}}

    def on_Viewer(self, _: Any) -> dict[str, Any]:
        return self._viewer()

    def on_GetViewer(self, _: Any) -> dict[str, Any]:
        return self._viewer()

    def on_GetDefaultEntity(self, _: Any) -> dict[str, Any]:
        return self._viewer()

    def on_ServerFeaturesQuery(self, _: Any) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def on_RunResumeStatus(self, told: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(told["name"])
        bucket = run and {
            "id": told["name"],
            "name": told["name"],
            "summaryMetrics": json.dumps(run.summary),
            "displayName": told["name"],
            "logLineCount": 0,
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
            "eventsTail": "[]",
            "config": json.dumps(run.config),
            "tags": [],
            "notes": "",
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": {"id": "p", "name": told["project"], "entity": self._entity(), "bucket": bucket}}

    def on_UpsertBucket(self, told: dict[str, Any]) -> dict[str, Any]:
        name = told["name"] or told["id"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, Run(told["project"]))
        if told["config"]:
            run.config.update(json.loads(told["config"]))
        project = {"id": "p", "name": run.project, "entity": self._entity()}
        about = {"id": name, "name": name, "displayName": told["displayName"] or name, "description": None}
        more = {"config": json.dumps(run.config), "sweepName": None, "project": project}
        lines = {"historyLineCount": len(run.history)}
        return {"upsertBucket": {"bucket": about | more | lines, "inserted": inserted}}

    def on_CreateRunFiles(self, told: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": self._place(told["run"], name)} for name in told["files"]]
        return {"createRunFiles": {"runID": told["run"], "uploadHeaders": [], "files": files}}

    def on_MarkRunFilesUploaded(self, _: Any) -> dict[str, Any]:
        return {"markRunFilesUploaded": {"success": True}}

    def on_XXHashDigestsEnabled(self, _: Any) -> dict[str, Any]:
        return {"entity": {"xxhashDigestsEnabled": False}}

    def on_OrganizationCoreWeaveOrganizationID(self, _: Any) -> dict[str, Any]:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def on_ArtifactType(self, _: Any) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def on_FetchArtifactDigestAlgorithm(self, _: Any) -> dict[str, Any]:
        return {"project": {"artifactType": None}}

    def on_ClientIDMapping(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"clientIDMapping": {"serverID": told["clientID"]}}

    def on_CreateArtifact(self, told: dict[str, Any]) -> dict[str, Any]:
        sequence = {"latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": "a", "state": "PENDING", "artifactSequence": sequence}}}

    def _manifest(self, _: Any) -> dict[str, Any]:
        file = {"id": "f", "uploadUrl": self._place("artifacts", "manifest"), "uploadHeaders": []}
        return {"artifactManifest": {"id": "m", "file": file}}

    def on_CreateArtifactManifest(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"createArtifactManifest": self._manifest(told)}

    def on_UpdateArtifactManifest(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"updateArtifactManifest": self._manifest(told)}

    def on_CreateArtifactFiles(self, told: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": self._place("artifacts", file["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            for file in told["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def on_CommitArtifact(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"commitArtifact": {"artifact": {"id": told["artifactID"], "digest": ""}}}

    def on_UseArtifact(self, _: Any) -> dict[str, Any]:
        return {"useArtifact": {"artifact": {"id": "a"}}}

    def on_UpsertView2(self, told: dict[str, Any]) -> dict[str, Any]:
        self.views[told["name"]] = dict(told)
        return {"upsertView": {"view": {"id": "v", "name": told["name"]}, "inserted": True}}

    def on_View(self, told: dict[str, Any]) -> dict[str, Any]:
        view = self.views[told["viewName"]]
        node = {"id": "v", "displayName": view["displayName"], "spec": view["spec"]}
        return {"project": {"allViews": {"edges": [{"node": node}]}}}

    def _entity(self) -> dict[str, str]:
        return {"id": "e", "name": ENTITY}

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a client that knows nobody else: what is not on this machine cannot be reached."""
        nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
        ours = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_DIR": str(home), "WANDB_SILENT": "true"}
        rest = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "WANDB_ERROR_REPORTING": "false"}
        place = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}
        return place | nowhere | rest | ours | more

    async def python(self, home: Path, *arguments: str, given: str = "", **more: str) -> str:
        """Run a Python program with this server as its wandb; return what it prints. It must end with 0."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env=self.environment(home, **more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await process.communicate(given.encode())
        assert process.returncode == 0, (error.decode(), self.unknown, self.refused)
        return out.decode()


@asynccontextmanager
async def wandb_server() -> AsyncIterator[Wandb]:
    server = Wandb()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/graphql", server.graphql)
    app.router.add_post("/files/{entity}/{project}/{run}/file_stream", server.stream)
    app.router.add_put("/storage/{path:.*}", server.store)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
