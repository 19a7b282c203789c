import "./story.js";
import { sharedEngine } from "nearfar";
import { ask, show } from "./asks.js";

show(ask("/parrot/", { worker: () => sharedEngine({ name: "asks" }) }));
