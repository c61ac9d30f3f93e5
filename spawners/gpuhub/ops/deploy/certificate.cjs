// Loaded into JupyterHub's proxy (NODE_OPTIONS=--require …): reloads a renewed certificate while connections stay open.
// The proxy itself reads certificate and key only when it starts, and a restart would end every notebook's connection.
"use strict";

const { execFile } = require("node:child_process");
const fs = require("node:fs");
const https = require("node:https");

const POLL_MS = 5000;
const RENEW_MS = 12 * 3600 * 1000;
const { GPUHUB_HTTPS_CERTIFICATE: certificate, GPUHUB_HTTPS_KEY: key, GPUHUB_HTTPS_RENEW: renew } = process.env;

const createServer = https.createServer;
let found = false;

https.createServer = function (options, ...rest) {
  const server = createServer.call(https, options, ...rest);
  // The proxy's API has another certificate, which is not changed.
  if (options.cert && fs.readFileSync(certificate).equals(Buffer.from(options.cert))) {
    found = true;
    watch(server, options);
  }
  return server;
};

function watch(server, options) {
  function reload() {
    try {
      server.setSecureContext({ ...options, cert: fs.readFileSync(certificate), key: fs.readFileSync(key) });
      console.error(`reloaded ${certificate}`);
    } catch (error) {
      // Perhaps only one file has changed yet: the change of the other one reloads both again.
      console.error(`${certificate} with ${key} cannot be used, the previous certificate stays in use: ${error.message}`);
    }
  }
  // watchFile follows links, such as certbot's.
  for (const file of new Set([certificate, key])) {
    fs.watchFile(file, { interval: POLL_MS, persistent: false }, reload);
  }
  if (renew) { setInterval(renewNow, RENEW_MS, JSON.parse(renew)).unref(); }
}

function renewNow([program, ...parameters]) {
  execFile(program, parameters, (error, stdout, stderr) => {
    if (error) { console.error(`the certificate could not be renewed: ${stderr || error.message}`); }
  });
}

setTimeout(() => {
  if (!found) {
    console.error("this version of the proxy is not supported: it serves HTTPS in another way");
    process.exit(1);
  }
}, 10000).unref();
