/**
 * Row p: cos(p·f) for each frequency f, then sin(p·f), times `scale`; a frequency of 0 neither rotates nor
 * scales. The products and functions are computed in float64 and rounded once, so that every runtime has the
 * same table.
 */
export function ropeTable(
  invFreq: Float32Array,
  scale: number,
  positions: number,
): Float32Array<ArrayBuffer> {
  const half = invFreq.length;
  const table = new Float32Array(positions * 2 * half);
  for (let p = 0; p < positions; p++) {
    const row = p * 2 * half;
    invFreq.forEach((frequency, i) => {
      table[row + i] = frequency === 0 ? 1 : Math.cos(p * frequency) * scale;
      table[row + half + i] = Math.sin(p * frequency) * scale;
    });
  }
  return table;
}
