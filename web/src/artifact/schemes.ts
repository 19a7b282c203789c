import type { QuantizationRecord, ScalesRecord, StoredRowsRecord } from "../format/constants.js";
import { ArtifactError } from "../protocol/errors.js";
import { type Field, show } from "./json.js";

/** Checks that every matrix of a manifest is stored in a scheme of the format, as format/consistency.py does. */

const CODE_BITS = [2, 3, 4, 5, 6, 8];
const GROUP_SIZES = [16, 32, 64, 128];
const FLOAT_BITS = [16, 32];
const SCALE_BITS = [4, 6, 8];
/** Bits of a scale that is a float16. */
const HALF = 16;
/** Bits of codes that a table gives values. */
const TABLE_BITS = 4;

interface Rows {
  readonly bits: number;
  readonly group: number;
  readonly scales: Required<ScalesRecord>;
}

export function checkSchemes(quantization: Field<QuantizationRecord>): void {
  quantization
    .at("matrices")
    .optional()
    ?.list((matrix) => {
      const name = matrix.at("name").string().slice(0, 80);
      const [n, k] = [matrix.at("n").int(1), matrix.at("k").int(1)];
      const pieces = matrix
        .at("pieces")
        .optional()
        ?.list((piece) => ({ n: piece.at("n").int(1), ...readRows(piece) }));
      if (pieces?.length && pieces.reduce((sum, piece) => sum + piece.n, 0) !== n)
        throw new ArtifactError(`The matrix ${name} has ${n} rows, and its pieces have others.`);
      for (const rows of pieces?.length ? pieces : [readRows(matrix)])
        if (!isScheme(rows, k))
          throw new ArtifactError(
            `The matrix ${name} has an unknown scheme for rows of ${k} weights: ${words(rows)}. Build the ` +
              "artifact again, or update nearfar.",
          );
    });
}

function readRows(field: Field<Pick<StoredRowsRecord, "bits" | "scales"> & { group_size?: number }>): Rows {
  const scales = field.at("scales").optional();
  return {
    bits: field.at("bits").int(1),
    group: field.at("group_size").optional()?.int() ?? 0,
    scales: {
      bits: scales?.at("bits").optional()?.int(1) ?? HALF,
      offsets: (scales?.at("offsets").optional()?.value ?? true) === true,
      superblock: scales?.at("superblock").optional()?.int() ?? 0,
      table: scales?.at("table").optional()?.oneOf(["iq4"]) ?? null,
    },
  };
}

/** Whether rows of k weights can be stored so: floats, or codes in whole groups and whole superblocks. */
function isScheme({ bits, group, scales }: Rows, k: number): boolean {
  if (group === 0) return FLOAT_BITS.includes(bits);
  const long = scales.superblock || group;
  return (
    CODE_BITS.includes(bits) &&
    GROUP_SIZES.includes(group) &&
    [k % group, long % group, k % long].every((rest) => rest === 0) &&
    (scales.superblock === 0 ? scales.bits === HALF : SCALE_BITS.includes(scales.bits)) &&
    (scales.table === null || (bits === TABLE_BITS && !scales.offsets))
  );
}

function words({ bits, group, scales }: Rows): string {
  const named = { ...scales, table: scales.table ?? "none" };
  const of = scales.superblock ? `, superblocks of ${scales.superblock}` : "";
  return `${bits} bits, groups of ${group}${of}, scales ${show(named)}`;
}
