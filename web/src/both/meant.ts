/** What may be meant by a name that is unknown. */

/** The known name that may be meant, as the end of a sentence; else the advice to leave the name out. */
export function meant(name: string, known: readonly string[]): string {
  const asked = letters(name);
  const close = known.find((one) => apart(asked, letters(one)) <= (asked.length > 5 ? 2 : 1));
  return close === undefined ? "; leave it out" : `: did you mean ${close}?`;
}

function letters(name: string): string {
  return name.toLowerCase().replace(/[^a-z]/g, "");
}

/** How many letters must be put in, taken out or replaced to make one text of the other. */
function apart(from: string, to: string): number {
  let row = Array.from({ length: to.length + 1 }, (_, at) => at);
  for (const [above, letter] of [...from].entries())
    row = [...to].reduce(
      (made, other, at) => [
        ...made,
        Math.min((made[at] ?? 0) + 1, (row[at + 1] ?? 0) + 1, (row[at] ?? 0) + Number(letter !== other)),
      ],
      [above + 1],
    );
  return row[to.length] ?? 0;
}
