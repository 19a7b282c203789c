import wabt from "wabt";
import {
  MAX_ROWS,
  ROW_BUCKETS,
  SAMPLE_COLUMNS,
  SAMPLE_I32,
  TOP_LOGPROBS,
} from "../../src/format/constants.js";
import {
  type Files,
  HEAD_DIM,
  LOOK_ARGS,
  MARKS,
  PAGES_PER_SLOT,
  SIZES,
  TOY_PAGE_SIZE,
  TOY_VOCAB,
  type ToyArtifact,
  type ToyOptions,
  toyArtifact,
} from "./toy-artifact.js";

/**
 * The toy artifact for WebAssembly: its kernels by hand, behind the interface of docs/wasm.md. A token of
 * TRAPS in the cache makes the first kernel trap, one of REFUSED makes it refuse.
 */
export const TRAPS = 94;
export const REFUSED = 93;

/** The arguments of each kind of kernel with their types, in the order of `programs`. */
const KINDS = {
  append: "tokens positions slots page_table.0 kv.0.k",
  look: `marks ${LOOK_ARGS}`,
  greedy: "logits sample_i32 sampled tokens",
  sample: "logits sample_i32 allowed sampled tokens",
  score: "sampled logprob top_ids top_logprobs",
} as const;
type Kind = keyof typeof KINDS;

const DTYPES: Readonly<Record<string, string>> = {
  marks: "uint32",
  allowed: "uint32",
  "kv.0.k": "float32",
  logits: "float32",
  logprob: "float32",
  top_logprobs: "float32",
};

const SIZES_OF: Readonly<Record<Kind, readonly number[]>> = {
  append: SIZES,
  look: [...new Set(SIZES.map((size) => Math.min(size, MAX_ROWS)))],
  greedy: ROW_BUCKETS,
  sample: ROW_BUCKETS,
  score: ROW_BUCKETS,
};
/** In the order that the module lists them in. */
const NAMES = (Object.keys(KINDS) as Kind[])
  .flatMap((kind) => SIZES_OF[kind].map((size) => ({ kind, size, name: `${kind}_${size}` })))
  .sort((a, b) => (a.name < b.name ? -1 : 1));

const KERNELS_AT = 1_100_000;
const ERROR_AT = 1_101_000;
const FAILED_AT = 1_102_000;
const STOP_AT = 1_102_004;

/** Local variables of a kernel: its arguments' addresses by their names, and numbers to work with. */
function kernel(kind: Kind, body: string): string {
  const names = KINDS[kind].split(" ").map((name) => name.split(".")[0]);
  const load = (name: string | undefined, i: number): string =>
    `(local.set $${name} (call $arg (local.get $args) (i32.const ${i})))`;
  return `(func $${kind} (param $args i32) (param $rows i32) (result i32)
    ${names.map((name) => `(local $${name} i32)`).join(" ")}
    (local $m i32) (local $p i32) (local $i i32) (local $h i32) (local $token i32) (local $at i32)
    ${names.map(load).join(" ")}
    ${body}
    (i32.const 0))`;
}

/** A loop over $name from 0 to `limit` − 1. */
const loop = (name: string, limit: string, body: string): string => `
  (local.set $${name} (i32.const 0))
  (block $end_${name} (loop $next_${name}
    (br_if $end_${name} (i32.ge_s (local.get $${name}) ${limit}))
    (block $continue_${name} ${body})
    (local.set $${name} (i32.add (local.get $${name}) (i32.const 1)))
    (br $next_${name})))`;

const get = (name: string): string => `(local.get $${name})`;
/** The address of element `index` of a buffer. */
const at = (buffer: string, index: string): string =>
  `(i32.add (local.get $${buffer}) (i32.shl ${index} (i32.const 2)))`;
const int = (buffer: string, index: string): string => `(i32.load ${at(buffer, index)})`;
const times = (a: string, b: number): string => `(i32.mul ${a} (i32.const ${b}))`;
const plus = (a: string, b: string): string => `(i32.add ${a} ${b})`;

/** The cache's element of position $p of row $m. */
const cell = (pagesPerSlot: number): string =>
  times(
    plus(
      times(
        int(
          "page_table",
          plus(
            times(int("slots", get("m")), pagesPerSlot),
            `(i32.div_s ${get("p")} (i32.const ${TOY_PAGE_SIZE}))`,
          ),
        ),
        TOY_PAGE_SIZE,
      ),
      `(i32.rem_s ${get("p")} (i32.const ${TOY_PAGE_SIZE}))`,
    ),
    HEAD_DIM,
  );
/** Adds a number to the hash $h, as the shaders do. */
const hash = (value: string): string => times(`(i32.xor ${get("h")} ${value})`, 0x01000193);

const append = ({ pagesPerSlot, disliked }: Speech): string =>
  kernel(
    "append",
    loop(
      "m",
      get("rows"),
      `(local.set $p ${int("positions", get("m"))})
    (br_if $continue_m (i32.lt_s ${get("p")} (i32.const 0)))
    (local.set $token ${int("tokens", get("m"))})
    ${disliked}
    (f32.store ${at("kv", cell(pagesPerSlot))} (f32.convert_i32_s ${get("token")}))`,
    ),
  );

/** How a toy chooses its next token. */
interface Speech {
  readonly pagesPerSlot: number;
  /** Code for a $token before it is written to the cache. */
  readonly disliked: string;
  /** Sets $token for row $m. */
  readonly next: string;
}

/** The token at position $p of row $m. */
const seen = (pagesPerSlot: number): string => `(i32.trunc_f32_s (f32.load ${at("kv", cell(pagesPerSlot))}))`;
const POSITIONS = `(i32.add ${int("positions", get("m"))} (i32.const 1))`;

const HASHED: Speech = {
  pagesPerSlot: PAGES_PER_SLOT,
  disliked: `(if (i32.eq ${get("token")} (i32.const ${TRAPS})) (then unreachable))
    (if (i32.eq ${get("token")} (i32.const ${REFUSED})) (then (return (i32.const -1))))`,
  next: `(local.set $h (i32.const 0x811c9dc5))
    ${loop("p", POSITIONS, `(local.set $h ${hash(seen(PAGES_PER_SLOT))})`)}
    (local.set $h ${times(`(i32.xor (i32.const 0x811c9dc5) ${get("h")})`, 0x01000193)})
    (local.set $token (i32.add (i32.const 1)
      (i32.rem_u (i32.shr_u ${get("h")} (i32.const 8)) (i32.const ${TOY_VOCAB - 1}))))`,
};

/**
 * Answers with the text between the last ^ of its prompt and the next ~, from the last @ on, and then ends.
 * Backticks become line breaks.
 */
const PARROT_CONTEXT = 4096;
const PARROT_PAGES = PARROT_CONTEXT / TOY_PAGE_SIZE;
const END = 96;
const token = (character: string): string => `(i32.const ${character.charCodeAt(0) - 31})`;
const PARROT: Speech = {
  pagesPerSlot: PARROT_PAGES,
  disliked: "",
  next: `(local.set $h (i32.const 0))
    (local.set $i (i32.const 0))
    (local.set $token (i32.const 0))
    ${loop(
      "p",
      POSITIONS,
      `(if (i32.eq ${seen(PARROT_PAGES)} ${token("^")}) (then (local.set $h ${get("p")})))
      (if (i32.eq ${seen(PARROT_PAGES)} ${token("@")})
        (then (local.set $i ${get("p")}) (local.set $token ${get("h")})))`,
    )}
    (local.set $p (i32.add (i32.add ${get("token")} (i32.const 1)) (i32.sub ${int("positions", get("m"))} ${get("i")})))
    (local.set $token ${seen(PARROT_PAGES)})
    (if (i32.eq ${get("token")} ${token("~")}) (then (local.set $token (i32.const ${END}))))`,
};

const look = ({ next }: Speech): string =>
  kernel(
    "look",
    loop(
      "at",
      get("rows"),
      `(local.set $m ${int("logit_rows", get("at"))})
    ${next}
    ${loop(
      "i",
      `(i32.const ${MARKS})`,
      `(if (i32.ne ${int("marks", get("i"))} ${times(get("i"), 3)}) (then (local.set $token (i32.const 0))))`,
    )}
    ${loop(
      "i",
      `(i32.const ${TOY_VOCAB})`,
      `(f32.store ${at("logits", plus(times(get("at"), TOY_VOCAB), get("i")))}
        (f32.convert_i32_s (i32.eq ${get("i")} ${get("token")})))`,
    )}`,
    ),
  );

const LOGIT = (index: string): string =>
  `(f32.load ${at("logits", plus(times(get("m"), TOY_VOCAB), index))})`;
const SAMPLE = (column: number): string =>
  int("sample_i32", plus(times(get("m"), SAMPLE_COLUMNS), `(i32.const ${column})`));

/** Chooses the likeliest token; `among` may choose another one. */
const choosing = (kind: Kind, among: string): string =>
  kernel(
    kind,
    loop(
      "m",
      get("rows"),
      `(br_if $continue_m (i32.lt_s ${SAMPLE(SAMPLE_I32.slot)} (i32.const 0)))
    (local.set $token (i32.const 0))
    ${loop(
      "i",
      `(i32.const ${TOY_VOCAB})`,
      `(if (f32.gt ${LOGIT(get("i"))} ${LOGIT(get("token"))}) (then (local.set $token ${get("i")})))`,
    )}
    ${among}
    (i32.store ${at("sampled", get("m"))} ${get("token")})
    (local.set $p ${SAMPLE(SAMPLE_I32.feed)})
    (if (i32.ge_s ${get("p")} (i32.const 0))
      (then (i32.store ${at("tokens", get("p"))} ${get("token")})))`,
    ),
  );

const GREEDY = choosing("greedy", "");
/** The word of `allowed` that token $p's bit is in. */
const WORD = plus(
  times(SAMPLE(SAMPLE_I32.slot), Math.ceil(TOY_VOCAB / 32)),
  `(i32.div_u ${get("p")} (i32.const 32))`,
);
const SAMPLED = choosing(
  "sample",
  loop(
    "i",
    `(i32.const ${TOY_VOCAB})`,
    `(local.set $p (i32.rem_u ${plus(get("token"), get("i"))} (i32.const ${TOY_VOCAB})))
    (if (i32.and (i32.shr_u ${int("allowed", WORD)} (i32.rem_u ${get("p")} (i32.const 32))) (i32.const 1))
      (then (local.set $token ${get("p")}) (br $end_i)))`,
  ),
);

const TOP = plus(times(get("m"), TOP_LOGPROBS), get("i"));
const SCORE = kernel(
  "score",
  loop(
    "m",
    get("rows"),
    `(f32.store ${at("logprob", get("m"))} (f32.const 0))
    ${loop(
      "i",
      `(i32.const ${TOP_LOGPROBS})`,
      `(i32.store ${at("top_ids", TOP)}
        (select ${int("sampled", get("m"))} ${get("i")} (i32.eqz ${get("i")})))
      (f32.store ${at("top_logprobs", TOP)}
        (select (f32.const 0) (f32.const -100) (i32.eqz ${get("i")})))`,
    )}`,
  ),
);

/** The words of a data segment in WAT. */
const words = (numbers: readonly number[]): string =>
  [...new Uint8Array(Uint32Array.from(numbers).buffer)]
    .map((byte) => `\\${byte.toString(16).padStart(2, "0")}`)
    .join("");

/** The module's source. A thread waits until the pool is freed, and then traps, so that nothing hangs. */
const source = (shared: boolean, speech: Speech): string => `(module
  (import "env" "memory" (memory 32 65535 ${shared ? "shared" : ""}))
  (type $kernel (func (param i32) (result i32)))
  (table ${NAMES.length + 1} funcref)
  (global $kernels (export "nf_kernels") i32 (i32.const ${KERNELS_AT}))
  (global $stack (export "__stack_pointer") (mut i32) (i32.const 1048576))
  (data (i32.const ${KERNELS_AT}) "${words([...NAMES.map((_, i) => i + 1), 0])}")
  (data (i32.const ${ERROR_AT}) "the toy refuses this token\\00")
  (elem (i32.const 1) ${NAMES.map(({ name }) => `$${name}`).join(" ")})
  (func $arg (param $args i32) (param $i i32) (result i32)
    (i32.load (i32.wrap_i64
      (i64.load offset=8 (i32.add (local.get $args) (i32.shl (local.get $i) (i32.const 4)))))))
  ${[append(speech), look(speech), GREEDY, SAMPLED, SCORE].join("\n")}
  ${NAMES.map(
    ({ kind, size, name }) =>
      `(func $${name} (type $kernel) (call $${kind} (local.get 0) (i32.const ${size})))`,
  ).join("\n")}
  (func (export "nf_pool_new") (param i32 i32) (result i32) (i32.const ${FAILED_AT}))
  (func (export "nf_pool_work") (param i32)
    ${shared ? `(drop (memory.atomic.wait32 (i32.const ${STOP_AT}) (i32.const 0) (i64.const -1)))` : ""})
  (func (export "nf_pool_free") (param i32) (i32.store (i32.const ${STOP_AT}) (i32.const 1)))
  (func (export "nf_pool_fail") (param i32) (i32.store (i32.const ${FAILED_AT}) (i32.const 1)))
  (func (export "nf_error") (result i32) (i32.const ${ERROR_AT}))
  (func (export "nf_replay") (param $pool i32) (param $launches i32) (param $n i32) (result i32)
    (local $i i32)
    ${loop(
      "i",
      get("n"),
      `(if (i32.ne (i32.const 0) (call_indirect (type $kernel)
          (i32.load offset=4 (local.get $launches)) (i32.load (local.get $launches))))
        (then (return (local.get $i))))
      (local.set $launches (i32.add (local.get $launches) (i32.const 32)))`,
    )}
    (i32.const -1)))`;

async function modules(
  speech: Speech,
): Promise<readonly { readonly shared: boolean; readonly code: Uint8Array }[]> {
  const { parseWat } = await wabt();
  return [true, false].map((shared) => {
    const parsed = parseWat("toy.wat", source(shared, speech), { threads: true });
    return { shared, code: Uint8Array.from(parsed.toBinary({}).buffer) };
  });
}

function program(
  files: Files,
  { shared, code }: { readonly shared: boolean; readonly code: Uint8Array },
): object {
  const name = shared ? "toy-threads" : "toy";
  const library = files.put(`kernels/${name}/model.wasm`, code);
  const plan = (of: string, size: number, launches: readonly [Kind, number][]): object => {
    const path = `plans/${of}.${size}.json`;
    const rows = Math.min(size, MAX_ROWS);
    const listed = launches.map(([kind, count]) => {
      const args = KINDS[kind].split(" ").map((arg) => (arg === "marks" ? "weight:marks" : `buffer:${arg}`));
      return { kernel: `${kind}_${count}`, args };
    });
    const { sha256 } = files.put(path, JSON.stringify({ function: of, size, rows, launches: listed }));
    return { size, rows, plan: path, sha256 };
  };
  const param = (arg: string): object => ({
    dtype: DTYPES[arg] ?? "int32",
    shape: arg === "marks" ? [MARKS] : [1],
  });
  const choose = (of: string, kind: Kind): object[] =>
    ROW_BUCKETS.map((size) => plan(of, size, [[kind, size]]));
  return {
    name,
    activations: "float32",
    kv_dtype: "float32",
    requires: { features: shared ? ["simd128", "atomics"] : ["simd128"], limits: {}, arch: "wasm32" },
    workspace: [],
    library: library.file,
    library_sha256: library.sha256,
    kernels: Object.fromEntries(
      NAMES.map((each) => [each.name, { params: KINDS[each.kind].split(" ").map(param) }]),
    ),
    functions: {
      step: SIZES.map((size) =>
        plan("step", size, [
          ["append", size],
          ["look", Math.min(size, MAX_ROWS)],
        ]),
      ),
      greedy: choose("greedy", "greedy"),
      sample: choose("sample", "sample"),
      logprobs: choose("logprobs", "score"),
    },
  };
}

async function speaking(speech: Speech, options: ToyOptions): Promise<ToyArtifact> {
  const made = await modules(speech);
  return toyArtifact({
    ...options,
    other: (files) => ({ target: "wasm", programs: made.map((each) => program(files, each)) }),
  });
}

/** The toy for WebAssembly, which answers like the toy for WebGPU. */
export function toyWasm(
  chatTemplate?: string,
  cut: Pick<ToyOptions, "packed" | "shardBytes"> = {},
): Promise<ToyArtifact> {
  return speaking(HASHED, { chatTemplate, ...cut });
}

/** The scripted toy. `more`: further fields of its manifest. */
export function parrotWasm(chatTemplate: string, more: object = {}): Promise<ToyArtifact> {
  const contextLength = PARROT_CONTEXT;
  return speaking(PARROT, { chatTemplate, contextLength, eosTokenIds: [END], instead: { "`": "\n" }, more });
}
