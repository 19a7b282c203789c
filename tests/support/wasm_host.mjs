// A host of WebAssembly artifacts for tests, in Node: memory, instances, threads, as docs/wasm.md says. It is
// driven through its pipes, which it reads one message at a time: the length of a JSON header (uint32), the
// header, then `bytes` bytes. What lies where in memory is for the other side to say.
import { readFileSync, readSync, writeSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { isMainThread, Worker, workerData } from "node:worker_threads";

const PAGE = 65536;

function work({ module, memory, top, pool, come }) {
  const { exports } = new WebAssembly.Instance(module, { env: { memory } });
  exports.__stack_pointer.value = top;
  Atomics.add(come, 0, 1);
  Atomics.notify(come, 0);
  try {
    exports.nf_pool_work(pool);
  } catch {
    exports.nf_pool_fail(pool);
  }
}

const still = new Int32Array(new SharedArrayBuffer(4));

/** A call on a pipe, again until it goes through: once there are workers, Node does not let pipes block. */
function patiently(call) {
  for (;;) {
    try {
      return call();
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(still, 0, 0, 1);
    }
  }
}

function fill(target) {
  for (let at = 0; at < target.length; ) {
    const count = patiently(() => readSync(0, target, at, target.length - at));
    if (count === 0) process.exit(0);
    at += count;
  }
  return target;
}

function send(header, body = new Uint8Array(0)) {
  const text = Buffer.from(JSON.stringify({ ...header, bytes: body.length }));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  for (const part of [length, text, body]) {
    for (let at = 0; at < part.length; ) at += patiently(() => writeSync(1, part, at));
  }
}

class Host {
  open({ file, size, shared }) {
    this.module = new WebAssembly.Module(readFileSync(file));
    const pages = Math.ceil(size / PAGE);
    this.memory = new WebAssembly.Memory({ initial: pages, maximum: pages, shared });
    this.exports = new WebAssembly.Instance(this.module, { env: { memory: this.memory } }).exports;
    return { exports: WebAssembly.Module.exports(this.module), kernels: this.exports.nf_kernels.value >>> 0 };
  }

  threads({ tops }) {
    const pool = this.exports.nf_pool_new(tops.length + 1, 0) >>> 0;
    const { module, memory } = this;
    const come = new Int32Array(new SharedArrayBuffer(4));
    for (const top of tops) {
      new Worker(fileURLToPath(import.meta.url), { workerData: { module, memory, top, pool, come } });
    }
    for (let seen = 0; seen < tops.length; seen = Atomics.load(come, 0)) Atomics.wait(come, 0, seen, 1000);
    return { pool };
  }

  call({ name, args }) {
    return { result: this.exports[name](...args) };
  }

  write({ at }, body) {
    new Uint8Array(this.memory.buffer).set(body, at);
    return {};
  }

  read({ at, count }) {
    return [{}, new Uint8Array(this.memory.buffer, at, count)];
  }

  copy({ at, to, count }) {
    new Uint8Array(this.memory.buffer).copyWithin(to, at, at + count);
    return {};
  }
}

if (isMainThread) {
  const host = new Host();
  for (;;) {
    const length = fill(Buffer.alloc(4)).readUInt32LE();
    const header = JSON.parse(fill(Buffer.alloc(length)).toString());
    const body = fill(new Uint8Array(header.bytes));
    try {
      const answer = host[header.op](header, body);
      send(...(Array.isArray(answer) ? answer : [answer]));
    } catch (error) {
      send({ error: `${error.name}: ${error.message}` });
    }
  }
} else {
  work(workerData);
}
