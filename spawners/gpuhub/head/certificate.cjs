// Loaded into JupyterHub's proxy (NODE_OPTIONS=--require …): a renewed certificate is taken up while connections go on.
// The proxy itself reads certificate and key at its start only, and a restart would cut every notebook's connection.
"use strict";

const { execFile } = require("node:child_process");
const fs = require("node:fs");
const https = require("node:https");

const LOOK_MS = 5000;
const RENEW_MS = 12 * 3600 * 1000;
const { GPUHUB_HTTPS_CERTIFICATE: certificate, GPUHUB_HTTPS_KEY: key, GPUHUB_HTTPS_RENEW: renew } = process.env;

const createServer = https.createServer;
let found = false;

https.createServer = function (options, ...rest) {
  const server = createServer.call(https, options, ...rest);
  // The proxy's API has a certificate of its own, and stays as it is.
  if (options.cert && fs.readFileSync(certificate).equals(Buffer.from(options.cert))) {
    found = true;
    watch(server, options);
  }
  return server;
};

function watch(server, options) {
  function take() {
    try {
      server.setSecureContext({ ...options, cert: fs.readFileSync(certificate), key: fs.readFileSync(key) });
      console.error(`took up ${certificate}`);
    } catch (error) {
      // One file may have changed and the other not yet: its own change is looked at too.
      console.error(`${certificate} with ${key} cannot be used, the last one goes on: ${error.message}`);
    }
  }
  // Looks at what a link leads to, as certbot's do.
  for (const file of new Set([certificate, key])) {
    fs.watchFile(file, { interval: LOOK_MS, persistent: false }, take);
  }
  if (renew) { setInterval(renewNow, RENEW_MS, JSON.parse(renew)).unref(); }
}

function renewNow([program, ...words]) {
  execFile(program, words, (error, stdout, stderr) => {
    if (error) { console.error(`the certificate could not be looked after: ${stderr || error.message}`); }
  });
}

setTimeout(() => {
  if (!found) {
    console.error("this version of the proxy is unknown: it serves HTTPS in another way");
    process.exit(1);
  }
}, 10000).unref();
