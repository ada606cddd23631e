"""NeMo Gym's episodes over HTTP: `POST /run` and what stands around it, in the env-server process.

`plan` checks the files, `server` starts them and is the head, `front` has the routes;
 `episodes` admits, bounds, joins and closes; `wire` has the messages;
`servers` calls other servers, `telemetry` counts. A protocol is what happens between a request and its result:
`own` (an environment of shmrl), `turn` (one turn of an agent against a resources server), `relay` (an agent that does
it all); `protocols` lists them. Names are imported from their modules: nothing is imported here.
"""
