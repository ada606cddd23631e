"""Sessions over HTTP and WebSocket, as OpenEnv and AgileRL clients speak them: one socket, one session, one process.

    client == WebSocket ==> SessionServer (`server`, in the env server) == socket pair ==> session process (`session`)
                                 |                                                              ^ fork
                                 +-- `processes` ==> template process (`template`): module and data, loaded once

The server only passes texts on, counts and keeps time: parsing, validating and the environment's own code are the
session process's, so that whatever a client sends or an environment does can be ended by ending one process.
`hosting.resolve_env` starts a server from a script; `remote.RemoteEnv` is the client
(`client.RemoteSession` one socket of it).
"""
