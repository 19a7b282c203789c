import {
  CODE_BITS,
  FLOAT_BITS,
  GROUP_SIZES,
  HALF,
  type QuantizationRecord,
  SCALE_BITS,
  type ScalesRecord,
  type StoredRowsRecord,
  TABLE_BITS,
} from "../format/constants.js";
import { ArtifactError } from "../protocol/errors.js";
import { type Field, show } from "./json.js";

/** Checks that every matrix of a manifest is stored in a scheme of the format, as format/consistency.py does. */

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
  if (group === 0) return among(FLOAT_BITS, bits);
  const long = scales.superblock || group;
  return (
    among(CODE_BITS, bits) &&
    among(GROUP_SIZES, group) &&
    [k % group, long % group, k % long].every((rest) => rest === 0) &&
    (scales.superblock === 0 ? scales.bits === HALF : among(SCALE_BITS, scales.bits)) &&
    (scales.table === null || (bits === TABLE_BITS && !scales.offsets))
  );
}

function among(numbers: readonly number[], number: number): boolean {
  return numbers.includes(number);
}

function words({ bits, group, scales }: Rows): string {
  const named = { ...scales, table: scales.table ?? "none" };
  const of = scales.superblock ? `, superblocks of ${scales.superblock}` : "";
  return `${bits} bits, groups of ${group}${of}, scales ${show(named)}`;
}
