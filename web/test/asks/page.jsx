import { Answer } from "./answer";
import { Asks } from "./asks.jsx";

export default function Page() {
  return (
    <>
      <Answer />
      <Asks />
    </>
  );
}
