// What the client programs of this folder share. Each asks a server as its users do, and prints what it got as JSON.
export const [, , url, model] = process.argv;
process.env.OPENAI_API_KEY = process.env.ANTHROPIC_API_KEY = "none";
export const HELLO = [{ role: "user", content: "Hello" }];
export const LONG = "word ".repeat(3000);
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
export const TRIP = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
export const called = [];
export const weather = ({ city }) => {
  called.push(city);
  return `rain in ${city}`;
};

/** The names of the classes of what a call throws, and its message. */
export async function thrown(call) {
  try {
    await call();
  } catch (error) {
    const names = [];
    for (let kind = error.constructor; kind?.name; kind = Object.getPrototypeOf(kind)) names.push(kind.name);
    return `${names.join(" ")} ${error.code ?? ""}: ${error.message}`;
  }
  return "nothing";
}

export const tell = (found) => console.log(JSON.stringify({ ...found, called }));
