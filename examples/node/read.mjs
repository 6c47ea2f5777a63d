// The energy of a process and all it starts, as the Smaragdine daemon tells it: from the .proto alone.
//
//   node read.mjs PID [--seconds 10] [--period-ms 10] [--job NAME] [--json]
//                     [--address unix:/run/smaragdine/monitor.sock] [--proto FILE]
//
// Ends after that many seconds, else with the process.

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    seconds: { type: "string" },
    "period-ms": { type: "string", default: "0" },
    job: { type: "string", default: "" },
    json: { type: "boolean", default: false },
    address: { type: "string", default: "unix:/run/smaragdine/monitor.sock" },
    proto: {
      type: "string",
      default: fileURLToPath(new URL("../../proto/smaragdine/v1/monitor.proto", import.meta.url)),
    },
  },
});
const pid = Number(positionals[0]);
if (!Number.isInteger(pid) || pid < 0) {
  console.error("usage: node read.mjs PID [--seconds 10] [--json]");
  process.exit(2);
}

// Nanoseconds since 1970 do not fit a double: 64-bit numbers come as text, and become BigInt where needed.
const definition = loadSync(options.proto, {
  keepCase: true, longs: String, enums: String, defaults: true, oneofs: true,
});
const { smaragdine } = grpc.loadPackageDefinition(definition);
const client = new smaragdine.v1.Monitor(options.address, grpc.credentials.createInsecure(), {
  // The server is one of a kind on this socket; its path is no host name.
  "grpc.default_authority": "localhost",
});

const call = (method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, (error, response) => (error ? reject(error) : resolve(response))));

/** A running total that starts again from 0 at `wrapsAt`: what was added since the first reading. */
class Counter {
  constructor(channel) {
    this.channel = channel;
    this.energy = 0;
    this.readings = 0;
  }

  add(t, value) {
    if (this.readings > 0) {
      const more = value - this.value;
      this.energy += more < 0 && this.channel._wraps_at ? more + this.channel.wraps_at : more;
    } else {
      this.firstValue = value;
      this.first = t;
    }
    this.readings += 1;
    this.value = value;
    this.last = t;
  }
}

async function main() {
  const session = await call("Start", { pid, period_ms: Number(options["period-ms"]), job: options.job });
  const counters = new Map(
    session.channels
      .filter((channel) => channel.quantity === "energy" && channel.kind === "KIND_COUNTER")
      .map((channel) => [channel.number, new Counter(channel)]),
  );
  let next = session.sequence;
  let ended = false;
  // The readings end with the session, and then so do we.
  const stop = () => call("Stop", { session_id: session.session_id }).catch(fail);
  const timer = options.seconds && setTimeout(stop, Number(options.seconds) * 1000);
  process.on("SIGINT", stop);

  const follow = () =>
    new Promise((resolve, reject) => {
      const stream = client.Read({ session_id: session.session_id, sequence: next, follow: true, every_ms: 100 });
      stream.on("data", (batch) => {
        for (let i = 0; i < batch.t_ns.length; i++) {
          counters.get(batch.channel[i])?.add(BigInt(batch.t_ns[i]), batch.value[i]);
        }
        next = batch.next_sequence;
        ended = batch.ended;
      });
      stream.on("error", reject);
      stream.on("end", resolve);
    });
  for (let patience = 50; !ended; ) {
    try {
      await follow();
      patience = 50;
    } catch (error) {
      // The daemon may be restarting: nothing that was sent is lost, one goes on at `next`.
      if (error.code !== grpc.status.UNAVAILABLE || --patience === 0) throw error;
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
  clearTimeout(timer);

  const rows = [...counters.values()]
    .filter((counter) => counter.readings > 1)
    .map((counter) => ({
      device: counter.channel.device,
      scope: counter.channel.scope,
      provenance: counter.channel.provenance,
      detail: counter.channel.detail,
      energy_j: counter.energy,
      first_value_j: counter.firstValue,
      last_value_j: counter.value,
      first_t_ns: String(counter.first),
      last_t_ns: String(counter.last),
      readings: counter.readings,
    }));
  if (options.json) {
    console.log(JSON.stringify({ session_id: session.session_id, period_ms: session.period_ms, channels: rows }));
    return;
  }
  for (const row of rows.filter((row) => row.scope === "SCOPE_DEVICE")) {
    const seconds = Number(BigInt(row.last_t_ns) - BigInt(row.first_t_ns)) / 1e9;
    const power = (row.energy_j / seconds).toFixed(1);
    console.log(`${row.device.padEnd(8)} ${row.energy_j.toFixed(3).padStart(12)} J  ${power.padStart(8)} W  ` +
      `${seconds.toFixed(1)} s, ${row.provenance.replace("PROVENANCE_", "").toLowerCase()}`);
  }
}

function fail(error) {
  console.error(`read.mjs: ${error.details ?? error.message}`);
  process.exit(1);
}

main().then(() => client.close(), fail);
