// Loaded into JupyterHub's proxy (NODE_OPTIONS=--require …), which has no options for them: limits of connections, and of
// the time for a TLS handshake and for the headers of a request. Without them, silent connections use up all files.
"use strict";

const http = require("node:http");
const https = require("node:https");

const LIMITS = {
  maxHeaderSize: 16 * 1024,
  headersTimeout: 10000,
  handshakeTimeout: 10000,
  connectionsCheckingInterval: 2000,
};
const MAX_CONNECTIONS = 16384;
// Many users can be behind one address.
const MAX_CONNECTIONS_PER_ADDRESS = 2048;

function limitConnections(server) {
  const open = new Map();
  server.maxConnections = MAX_CONNECTIONS;
  server.on("connection", (socket) => {
    const address = socket.remoteAddress;
    const count = (open.get(address) || 0) + 1;
    open.set(address, count);
    socket.once("close", () => {
      const left = open.get(address) - 1;
      if (left) { open.set(address, left); } else { open.delete(address); }
    });
    if (count > MAX_CONNECTIONS_PER_ADDRESS) { socket.destroy(); }
  });
  return server;
}

for (const library of [http, https]) {
  const createServer = library.createServer;
  library.createServer = function (first, ...rest) {
    const [options, ...others] = typeof first === "function" ? [{}, first, ...rest] : [first, ...rest];
    return limitConnections(createServer.call(library, { ...LIMITS, ...options }, ...others));
  };
}
